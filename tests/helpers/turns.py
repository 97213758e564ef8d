"""A neighbour in a thread of its own, which takes a turn every two milliseconds and notes how long it had to wait.

What counts is the time of processors that the process used meanwhile, not that of a clock: on a machine that is busy
with others a turn comes late whatever the process does. Linux also says how much memory the process took at most.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

MOST = 0.25  # seconds of processors between two turns
_PAUSE = 0.002
_LEFT = 5.0  # seconds to wait for threads of earlier tests


class Neighbour:
    """Takes turns until it is stopped."""

    def __init__(self) -> None:
        self.longest = 0.0  # seconds of processors between two turns
        self.grown = 0  # bytes that the process had more at its largest than before; 0 where the system does not say
        self._before = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._take_turns, name="neighbour", daemon=True)

    def _take_turns(self) -> None:
        last = time.process_time()
        while not self._stopped.is_set():
            time.sleep(_PAUSE)
            now = time.process_time()
            self.longest = max(self.longest, now - last)
            last = now

    def start(self) -> None:
        with contextlib.suppress(OSError):  # the largest size is from here on
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _resident("VmRSS")
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        if self._before:
            self.grown = max(0, _resident("VmHWM") - self._before)


def _resident(name: str) -> int:
    """The bytes of a line of /proc/self/status."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def wait_until_idle() -> None:
    """Wait for threads that earlier tests left at work, a few seconds at most: their time would count, too."""
    end = time.monotonic() + _LEFT
    while time.monotonic() < end:
        before = time.process_time()
        time.sleep(10 * _PAUSE)
        if time.process_time() - before < 2 * _PAUSE:
            return


@contextlib.contextmanager
def neighbour() -> Iterator[Neighbour]:
    """A neighbour during the block. The collector rests: a run of tests has far more objects than a session."""
    wait_until_idle()
    enabled, taking = gc.isenabled(), Neighbour()
    gc.disable()
    taking.start()
    try:
        yield taking
    finally:
        taking.stop()
        if enabled:
            gc.enable()
