"""The deprecated parts of JAX that these kernels still use, and a filter for their warnings."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

# JAX 0.11 and later give the first warning at every lowering of a GPU kernel, and the second at an import.
KNOWN = (
    r"The Pallas Triton backend is deprecated"
    r"|jax\.experimental\.pallas\.ops\.gpu\.paged_attention is deprecated"
)
_FILTER = ("ignore", re.compile(KNOWN), DeprecationWarning, None, 0)
_lock = threading.Lock()
_inside = 0


@contextlib.contextmanager
def known() -> Iterator[None]:
    """Silence the warnings that match KNOWN while GPU kernels may be lowered, and leave all others as they are.

    `warnings.catch_warnings` would put back a list that another thread has changed meanwhile, and programs are lowered
    in several threads at once. Here the last of them removes the one filter. Lists are replaced and not changed:
    a thread that is searching one would skip an entry. IPython's completions failed so, where "ignore" hides "error".
    """
    global _inside
    with _lock:
        if not _inside:
            warnings.filters = [_FILTER, *_others()]
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                warnings.filters = _others()


def _others() -> list[Any]:
    return [entry for entry in warnings.filters if entry is not _FILTER]


@functools.cache
def jax_paged_attention() -> Callable[..., Any]:
    """Return JAX's own paged attention for GPUs, for comparison in benchmarks."""
    with known():
        from jax.experimental.pallas.ops.gpu import paged_attention
    return paged_attention.paged_attention
