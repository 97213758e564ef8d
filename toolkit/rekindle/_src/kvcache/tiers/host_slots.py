"""Host memory for payloads of pages: slots of one size in large pieces, used again once no array lies in them.

Fresh memory makes transfers slow: the system maps and zeroes it at first touch, 4 KiB at a time for an array of a
page's size. Reading 63 MB of pages took 15,400 such faults, 17 ms to 190 ms; from large pieces, which numpy asks
huge pages for, it takes 30, and from slots that were used before none. Slots begin on cache lines, so that XLA:CPU
reads payloads in place instead of copying them first.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

PIECE, LINE = 16 << 20, 64


class _Piece:
    def __init__(self, slot: int, count: int) -> None:
        memory = np.empty(slot * count + LINE, np.uint8)
        self.memory = memory[-memory.ctypes.data % LINE :][: slot * count]
        self.count = count
        self.free = list(range(count - 1, -1, -1))


class Slots:
    """Any thread may take a slot. It comes back by itself when the last array in it is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._size = 0  # bytes of a slot, set by the first payload
        self._pieces: list[_Piece] = []
        # Filled when arrays are collected, which may happen at any time, also while this thread has the lock.
        self._returned: deque[tuple[_Piece, int]] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces, whether used or not."""
        return sum(piece.memory.nbytes for piece in self._pieces)

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return memory for `size` bytes: a slot if they fill one, as a session's payloads do, else fresh memory."""
        with self._lock:
            self._size = self._size or -(-size // LINE) * LINE
            if not 0 <= self._size - size < LINE:
                return np.empty(size, np.uint8)
            self._reclaim()
            piece = next((piece for piece in self._pieces if piece.free), None)
            if piece is None:
                piece = _Piece(self._size, max(1, PIECE // self._size))
                self._pieces.append(piece)
            index = piece.free.pop()
        start = index * self._size
        # Not a slice of the array: numpy lets views of a slice refer to the whole, and the slot would seem unused.
        slot = np.frombuffer(memoryview(piece.memory)[start : start + size], np.uint8)  # type: ignore[arg-type]
        weakref.finalize(slot, self._returned.append, (piece, index)).atexit = False
        return slot

    def reclaim(self) -> None:
        """Give unused pieces back to the system."""
        with self._lock:
            self._reclaim()
            self._pieces = [piece for piece in self._pieces if len(piece.free) < piece.count]

    def _reclaim(self) -> None:
        while self._returned:
            piece, index = self._returned.popleft()
            piece.free.append(index)
