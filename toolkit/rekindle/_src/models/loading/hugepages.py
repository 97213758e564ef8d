"""Host memory for weights that a CPU device adopts: cache-line aligned, and on huge pages where the system has them.

Reading 270 MB of weights for each token crosses 66,000 small pages; on huge pages, products of two rows read 39 instead
of 35 GB/s. numpy uses huge pages from 4 MB on, and most matrices of a small model are smaller, so leaves share slabs.

The first touch of a page takes time: 2 ms for each MB where the host of a virtual machine had taken the memory back. So
a process that opens a model first touches memory for its weights while one core is idle, which is `PrefaultArena`.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rekindle_kernels import system

SLAB, HUGE, LINE = 64 << 20, 2 << 20, 64
PIECE = 8 << 20  # bytes that are touched at a time

_lock = threading.Lock()
_slab: NDArray[np.uint8] = np.empty(0, np.uint8)  # the unused rest of the latest slab; arrays keep theirs alive
_ahead: PrefaultArena | None = None


def aligned(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Return memory that begins on a cache line. XLA:CPU uses such memory without copying it."""
    global _slab
    count = math.prod(shape) * np.dtype(dtype).itemsize
    padded = -(-count // LINE) * LINE
    with _lock:
        memory = None if _ahead is None else _ahead.take(padded)
        if memory is not None:
            pass
        elif padded > SLAB // 4:
            memory = huge_pages(padded)
        else:
            if padded > _slab.size:
                _slab = huge_pages(SLAB)
            memory, _slab = _slab[:padded], _slab[padded:]
    return memory[:count].view(dtype).reshape(tuple(shape))


def adopted(values: NDArray[Any]) -> NDArray[Any]:
    """Return a copy in memory that the device uses as it is."""
    memory = aligned(values.shape, values.dtype)
    memory[...] = values
    return memory


class PrefaultArena:
    """Memory that a thread touches, without the GIL, until the first array takes some of it or it is closed.

    The process's arrays lie there as long as there is room. `close` gives the rest back.
    """

    def __init__(self, size: int) -> None:
        """Begin to touch `size` bytes at once, in a thread."""
        global _ahead
        self.memory = huge_pages(-(-size // HUGE) * HUGE)
        self.used = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._touch, name="rekindle memory", daemon=True)
        self._thread.start()
        with _lock:
            _ahead = self

    def take(self, size: int) -> NDArray[np.uint8] | None:
        """Return memory; None if there is not enough. The caller holds the lock."""
        self._stop()
        if self.used + size > self.memory.size:
            return None
        self.used += size
        return self.memory[self.used - size : self.used]

    def close(self) -> None:
        """Return unused memory to the system. Arrays go on using theirs."""
        global _ahead
        with _lock:
            if _ahead is self:
                _ahead = None
            self._stop()
            rest = self.memory[-(-self.used // HUGE) * HUGE :]
            if rest.size:
                system.give_back(rest.ctypes.data, rest.size)

    def _stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _touch(self) -> None:
        for start in range(0, self.memory.size, PIECE):
            if self._stopped.is_set():
                return
            piece = self.memory[start : start + PIECE]
            ctypes.memset(piece.ctypes.data, 0, piece.size)


def huge_pages(size: int) -> NDArray[np.uint8]:
    """Return a new mapping of zeroed memory that begins on a huge page. Pages that are never touched take no memory."""
    raw = np.frombuffer(system.anonymous_memory(size + HUGE), np.uint8)
    return raw[-raw.ctypes.data % HUGE :][:size]
