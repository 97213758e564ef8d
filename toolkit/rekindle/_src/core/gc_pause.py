"""Python's search for cyclic garbage, kept off while much is made that stays: each time it would look through all."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0  # threads
_was_on = False


@contextmanager
def gc_paused(*, stays: bool = False) -> Iterator[None]:
    """Several threads at once: the first turns it off, the last turns it on again if it was on.

    With `stays`, all that there is counts as old then. Else the next search is through what was made: 70 ms after
    imports. What is garbage by then is found later for it.
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
                if stays and not gc.get_freeze_count():  # somebody's own frozen objects stay so
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()
