"""Turns a panic in the tokenizers library into an error that fails one request.

pyo3 raises a Rust panic as `PanicException`, which derives from `BaseException`: `except Exception` lets it pass, and
one prompt would end the dispatch loop with every other request. The library's state is not shared between calls, so
the next call works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rekindle._src.core.own_failure import is_panic
from rekindle.errors import RekindleError


@contextlib.contextmanager
def panics_as(error: Callable[[str], RekindleError], doing: str) -> Iterator[None]:
    """Raise `error` in place of a panic within the block; every other exception passes as it is."""
    try:
        yield
    except BaseException as cause:
        if not is_panic(cause):
            raise
        raise error(f"the tokenizers library panicked while {doing}: {_first_line(cause)}") from cause


def _first_line(error: Any) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
