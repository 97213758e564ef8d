"""Counts how long steps waited for their programs, and names the program that a step waits for now."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from rekindle._src.core.activity import Activity, State
from rekindle._src.core.progress import in_marimo


class ProgramWait:
    """Counts the seconds in which a session's steps stood still because a program was compiled or loaded.

    One thread waits at a time; any thread may read. The wait is shown while it lasts, unless the session is quiet.
    """

    def __init__(self, *, quiet: bool = True) -> None:
        self.program: str = ""  # that a step waits for; empty if none
        self._quiet = quiet
        self._total = self._since = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def waiting(self, program: str) -> Iterator[None]:
        """Count the time of this block as a wait for `program`."""
        with self._lock:
            self.program, self._since = program, time.perf_counter()
        try:
            with Activity(self._state, quiet=self._quiet):
                yield
        finally:
            with self._lock:
                self._total += time.perf_counter() - self._since
                self.program = ""

    def shown_by_caller(self) -> AbstractContextManager[object]:
        """Show the wait in the thread that waits for an answer, where no other thread can: in marimo."""
        return Activity(self._state, quiet=self._quiet) if in_marimo() else contextlib.nullcontext()

    def describe(self) -> str:
        """Return the compilation that a step waits for, in words; empty if there is none."""
        program = self.program
        if not program:
            return ""
        from rekindle_kernels import kernel_being_compiled  # imports JAX, as programs did before

        kernel = kernel_being_compiled()
        return f"compiling program {program}" + (f", kernel {kernel}" if kernel else "")

    def _state(self) -> State | None:
        text = self.describe()
        return State(text) if text else None

    def seconds(self, now: float) -> float:
        """Return the seconds waited up to `now` (by `time.perf_counter()`), including a wait in progress."""
        with self._lock:
            return self._total + (max(0.0, now - self._since) if self.program else 0.0)
