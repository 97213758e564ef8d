"""A store that writes later: until the first text is there, processor time is worth more.

Serialising a program and importing Orbax take half a second of a core, most of it with the GIL, which tracing needs.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

NOT_STORED = "not stored yet"  # a reason of `StoreError`
DELAY = 2.0  # seconds from the first program to be written


class Store(Protocol):
    """Executables on disk, which outlive the process."""

    def load(self, name: str) -> Any:
        """Load an executable. Raise `StoreError` with the reason if there is none."""

    def holds(self, name: str) -> bool:
        """True if there seems to be one."""

    def save(self, name: str, compiled: Any, compile_seconds: float) -> bool: ...


class LateStore:
    """A store in front of another one. While it is `late`, programs are written after a delay, in a thread.

    `flush` returns when all of them are written. It is called before the executables are released and before the
    interpreter ends.
    """

    def __init__(self, store: Store, *, delay: float = DELAY) -> None:
        self.late = False
        self._store, self._delay = store, delay
        self._waiting: deque[tuple[str, Any, float]] = deque()
        self._lock = threading.Lock()  # of the three below
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._writing = threading.Lock()

    def load(self, name: str) -> Any:
        """Load an executable. Raises `StoreError` with the reason if there is none."""
        return self._store.load(name)

    def holds(self, name: str) -> bool:
        """True if there seems to be one on disk."""
        return self._store.holds(name)

    def save(self, name: str, compiled: Any, compile_seconds: float) -> bool:
        """Write it now, or soon. Return False if writing was tried and failed."""
        if not self.late:
            return self._store.save(name, compiled, compile_seconds)
        with self._lock:
            self._waiting.append((name, compiled, compile_seconds))
            if self._thread is None:
                self._hurry.clear()
                # A daemon: the end of the interpreter, which flushes, does not wait for its delay.
                self._thread = threading.Thread(target=self._later, name="rekindle store", daemon=True)
                self._thread.start()
        return True

    def flush(self) -> None:
        """Write the waiting programs."""
        self._hurry.set()
        self._write()

    def _later(self) -> None:
        self._hurry.wait(self._delay)
        with self._lock:
            self._thread = None  # programs saved from now on wait for another thread
        self._write()

    def _write(self) -> None:
        with self._writing:
            while self._waiting:
                self._store.save(*self._waiting.popleft())
