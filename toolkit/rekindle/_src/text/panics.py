"""A panic in the tokenizers library, made an error that fails one request.

pyo3 raises a Rust panic as `PanicException`, which derives from `BaseException`: `except Exception` lets it pass, and
one prompt would end the dispatch loop with every other request. The library's state is not shared between calls, so
the next call works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rekindle.errors import RekindleError


def is_panic(error: BaseException) -> bool:
    """Whether an exception is a Rust panic. Its class can't be imported, so it is told by its name."""
    return any(kind.__name__ == "PanicException" for kind in type(error).__mro__)


@contextlib.contextmanager
def panics_as(error: Callable[[str], RekindleError], doing: str) -> Iterator[None]:
    """Raises `error` in place of a panic within the block; every other exception passes as it is."""
    try:
        yield
    except BaseException as cause:
        if not is_panic(cause):
            raise
        raise error(f"the tokenizers library panicked while {doing}: {_first_line(cause)}") from cause


def _first_line(error: Any) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
