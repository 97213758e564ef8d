"""Keeps Python's cyclic garbage collector off while many lasting objects are created: each run would scan them all."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

FROZEN_AT_START = (
    1_000 if sys.version_info[:2] == (3, 12) else 0
)  # at most; Python 3.12 itself freezes some 400 objects
own_process = False  # True in the command line's process: no other code freezes objects, and imports stay to the end
_lock = threading.Lock()
_inside = 0  # threads
_was_on = False


@contextmanager
def gc_paused(*, stays: bool = False) -> Iterator[None]:
    """Keep the collector off inside the block. Of several threads, the last one to leave turns it on if it was on.

    With `stays`, all objects count as old at the end, so that the next run doesn't scan the new ones: 70 ms after
    imports. Garbage among them is collected later.
    """
    global _inside, _was_on
    with _lock:
        if not _inside:
            _was_on = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_on:
                if stays and own_process:
                    gc.freeze()
                elif stays and gc.get_freeze_count() <= FROZEN_AT_START:  # objects that the user froze stay frozen
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()
