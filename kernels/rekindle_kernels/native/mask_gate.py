"""A gate: the host writes masks while the program that reads them already runs.

Which tokens a grammar allows is known when the tokens of the step before have been read, and a program that is
dispatched only then leaves the device idle meanwhile. So the program is dispatched before, with the address of a gate.
It waits at the gate once it has run the model, which takes milliseconds longer than filling the masks.
"""

from __future__ import annotations

import threading

import numpy as np
from jax import Array
from numpy.typing import NDArray

from rekindle_kernels.native.build import builds, unavailable_reason
from rekindle_kernels.native.calling import call
from rekindle_kernels.native.kernel_table import GATE, MASK_GATE
from rekindle_kernels.native.layout import WORD
from rekindle_kernels.ops.registry import current_platform

_fence = threading.Lock()
_in_use: set[MaskGate] = set()  # they stay alive: a program may wait there


class MaskGate:
    """The host's side: `close` it, dispatch the program, write `masks`, `open` it, and `release` it after the program.

    A program waits for about a minute, and not at all in the thread that closed the gate, which could not open it then:
    XLA runs a program in the thread that dispatches it where asynchronous dispatch is turned off.
    """

    __slots__ = ("_words", "address", "masks")

    def __init__(self, rows: int, words_of_mask: int) -> None:
        header = MASK_GATE.size // WORD
        memory = np.zeros(header + -(-rows * words_of_mask // 2), np.int64)
        start = memory.ctypes.data
        self._words = memory[:header]
        self.address: NDArray[np.int32] = np.array([start & 0xFFFFFFFF, start >> 32], np.uint32).view(np.int32)
        behind = memory[header:].view(np.int32)[: rows * words_of_mask]
        self.masks: NDArray[np.int32] = behind.reshape(rows, words_of_mask)
        self.masks.fill(-1)

    @property
    def missed(self) -> bool:
        """True if a program went on without the masks; its results have to be discarded."""
        return bool(self._words[MASK_GATE.index("missed")])

    def close(self) -> None:
        """The next program waits until this thread opens it."""
        _in_use.add(self)
        self._words[MASK_GATE.index("opener")] = threading.get_ident()
        self._words[MASK_GATE.index("open")] = self._words[MASK_GATE.index("missed")] = 0

    def open(self) -> None:
        """The masks are written: programs that wait go on."""
        for _ in range(2):  # no write passes a lock that is taken twice: the masks' come before, the next one after
            with _fence:
                pass
        self._words[MASK_GATE.index("open")] = 1

    def release(self) -> None:
        """The program has ended."""
        _in_use.discard(self)


def has_mask_gates(implementation: str | None = None, *, platform: str | None = None) -> bool:
    """True if `gated_masks` can be called in programs that run their operations with `implementation`."""
    supported = implementation in (None, "native") and (platform or current_platform()) == "cpu"
    return supported and unavailable_reason() is None and builds(GATE.variant().name)


def gated_masks(address: Array, logits: Array) -> Array:
    """Return the masks int32 [N, mask_words(V)] of the `MaskGate` with this address int32 [2], once it is open.

    The program does not wait before logits [N, V] are computed. Where the gate stays closed, all bits are 0.
    """
    sizes = {"W": -(-logits.shape[1] // 32)}
    (masks,) = call(GATE.variant(), {"gate": address, "logits": logits}, sizes=sizes)
    return masks
