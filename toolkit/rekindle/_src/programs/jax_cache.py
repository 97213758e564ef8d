"""JAX's own compilation cache, where a user has enabled it.

A program from there loses its functions when it is serialised again, and fails when it runs ("Function … not found",
jax 0.10 to 0.12). So such programs are left to that cache.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import jax

KEPT_THERE = "JAX's compilation cache has it, and programs from there can't be stored again"
_HIT = "/jax/compilation_cache/cache_hits"
_hits = threading.local()  # of this thread, which is the one that compiles


@contextlib.contextmanager
def watching_hits() -> Iterator[Callable[[], bool]]:
    """Yield a function that is True if a program came from that cache, in this thread, since the context began."""
    before = getattr(_hits, "count", 0)
    yield lambda: getattr(_hits, "count", 0) > before


def _count(event: str, **_: str | int) -> None:
    if event == _HIT:
        _hits.count = getattr(_hits, "count", 0) + 1


jax.monitoring.register_event_listener(_count)
