"""A gate: masks that the host writes while the program that reads them already runs.

Which tokens a grammar allows is known when the tokens of the step before have been read, and a program that is
dispatched only then leaves the device idle meanwhile. So the program is dispatched before, with the address of a gate.
It waits at the gate behind the model, which takes milliseconds longer than filling the masks does.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from rekindle_kernels.native.layout import WORD, words

# Whether it is open, the thread that opens it, and whether a program went on although it was closed. The masks follow
# at the next cache line.
GATE = words("Gate", {"open": 0, "opener": 1, "missed": 2}, size=8)
_fence = threading.Lock()
_in_use: set[MaskGate] = set()  # they stay alive: a program may wait there


class MaskGate:
    """The host's side: `close` it, dispatch the program, write `masks`, `open` it, and `release` it after the program.

    A program waits for about a minute, and not at all in the thread that closed the gate, which could not open it then:
    XLA runs a program in the thread that dispatches it where asynchronous dispatch is turned off.
    """

    __slots__ = ("_words", "address", "masks")

    def __init__(self, rows: int, words_of_mask: int) -> None:
        header = GATE.size // WORD
        memory = np.zeros(header + -(-rows * words_of_mask // 2), np.int64)
        start = memory.ctypes.data
        self._words = memory[:header]
        self.address: NDArray[np.int32] = np.array([start & 0xFFFFFFFF, start >> 32], np.uint32).view(np.int32)
        behind = memory[header:].view(np.int32)[: rows * words_of_mask]
        self.masks: NDArray[np.int32] = behind.reshape(rows, words_of_mask)
        self.masks.fill(-1)

    @property
    def missed(self) -> bool:
        """True if a program went on without the masks; what it gives has to be thrown away."""
        return bool(self._words[GATE.index("missed")])

    def close(self) -> None:
        """The next program waits until this thread opens it."""
        _in_use.add(self)
        self._words[GATE.index("opener")] = threading.get_ident()
        self._words[GATE.index("open")] = self._words[GATE.index("missed")] = 0

    def open(self) -> None:
        """The masks are written: programs that wait go on."""
        for _ in range(2):  # no write passes a lock that is taken twice: the masks' come before, the next one after
            with _fence:
                pass
        self._words[GATE.index("open")] = 1

    def release(self) -> None:
        """The program has ended."""
        _in_use.discard(self)
