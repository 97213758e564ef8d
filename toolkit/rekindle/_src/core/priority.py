"""The priority of a thread that works beside those that serve."""

from __future__ import annotations

import contextlib
import os
import sys
import threading


def yield_to_others() -> None:
    """Give this thread a lower priority than those that serve, where threads have priorities of their own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
