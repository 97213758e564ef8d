"""Work alongside threads that serve: lower priorities, and the interpreter's lock handed over more often."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

# Seconds for which a thread keeps the interpreter's lock while another one waits for it. A step in parts takes the lock
# dozens of times; while a program was being traced, it waited for Python's 5 ms each time.
INTERVAL = 1e-4
_lock = threading.Lock()
_inside = 0
_before = 0.0


def yield_to_others() -> None:
    """Give this thread a lower priority than those that serve, where threads have priorities of their own."""
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
            if not _inside and sys.getswitchinterval() <= INTERVAL:  # or somebody has set another one meanwhile
                sys.setswitchinterval(_before)
