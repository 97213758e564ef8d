"""Work alongside threads that serve: lower priorities, and the interpreter's lock handed over more often."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

# Seconds for which a thread keeps the interpreter's lock while another one waits for it. A step in parts takes the lock
# dozens of times; while a program was being traced, it waited for Python's 5 ms each time.
INTERVAL = 1e-4
LOOK = 0.02  # seconds between two looks at the main thread
WORKING = 0.1  # share of a core that the main thread uses while a cell runs or Tab completes; an idle one uses 0.01
PATIENCE = 2.0  # seconds for which a job lets the main thread go first
_lock = threading.Lock()
_inside = 0
_before = 0.0


def yield_to_others() -> None:
    """Give this thread a lower priority than the serving threads, where threads have their own priorities."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


@contextlib.contextmanager
def handing_over() -> Iterator[None]:
    """Let all threads hand the interpreter's lock over sooner inside the `with` block."""
    global _inside, _before
    with _lock:
        if not _inside:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, INTERVAL))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and sys.getswitchinterval() <= INTERVAL:  # or another value was set meanwhile
                sys.setswitchinterval(_before)


def main_thread_seconds() -> float | None:
    """Return the processor time that the main thread has used so far; None where the system does not tell."""
    main = threading.main_thread()
    if sys.platform != "linux" or main.ident is None or not main.is_alive():
        return None
    return time.clock_gettime(time.pthread_getcpuclockid(main.ident))


def give_way(
    stopped: Callable[[], bool],
    *,
    patience: float = PATIENCE,
    used: Callable[[], float | None] = main_thread_seconds,
) -> None:
    """Wait while the main thread works, up to `patience` seconds, or until `stopped()`.

    A job in the background that holds the interpreter's lock takes half of it from a cell, or from a completion at Tab.
    A main thread that awaits a request does not work: the work for the request is not held up.
    """
    before, at = used(), time.monotonic()
    ends = at + patience
    while before is not None and at < ends and not stopped():
        time.sleep(LOOK)
        now, then = used(), time.monotonic()
        if now is None or now - before < WORKING * (then - at):
            return
        before, at = now, then
