"""Progress of a load: bytes read, the rate, and the seconds that remain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple


class LoadProgress(NamedTuple):
    """One progress report. The last one of a load has `done == total`."""

    done: int  # bytes read
    total: int
    seconds: float

    @property
    def rate(self) -> float:
        """The bytes per second so far."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta(self) -> float:
        """The seconds that remain at this rate."""
        return (self.total - self.done) / self.rate if self.done else float("inf")

    @property
    def share(self) -> str:
        """The bytes read and their total, in words."""
        return f"{self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"

    def __str__(self) -> str:
        eta = "" if self.done >= self.total or not self.done else f", {self.eta:.1f} s left"
        return f"{self.share} at {self.rate / 1e6:,.0f} MB/s{eta}"


Report = Callable[[LoadProgress], None]


class ByteMeter:
    """A counter of bytes from any thread, which reports at most every 50 ms and once at the end."""

    def __init__(self, total: int, report: Report | None) -> None:
        self._total, self._report = total, report
        self._lock = threading.Lock()
        self._start = self._last = time.perf_counter()
        self._done = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count

    def tell(self, *, final: bool = False) -> None:
        """Call `report` in this thread. Workers only `add`, so that the callback can update widgets."""
        now = time.perf_counter()
        if self._report is None or (not final and now - self._last < 0.05):
            return
        self._last = now
        with self._lock:
            done = self._total if final else self._done
        self._report(LoadProgress(done, self._total, now - self._start))
