"""Counts the function calls of a session's own threads: work of the host that no busy machine distorts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Calls:
    """How many functions, Python's and built-in ones, the threads called that were started while it listened."""

    def __init__(self) -> None:
        self.count = 0
        self.counting = False

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if self.counting and event in ("call", "c_call"):
            self.count += 1

    @contextmanager
    def counted(self) -> Iterator[list[int]]:
        """Gives a list that holds the count afterwards."""
        result: list[int] = []
        before, self.counting = self.count, True
        try:
            yield result
        finally:
            self.counting = False
            result.append(self.count - before)


@contextmanager
def listening() -> Iterator[Calls]:
    """Threads that are started inside tell what they call."""
    calls = Calls()
    threading.setprofile(calls)
    try:
        yield calls
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
