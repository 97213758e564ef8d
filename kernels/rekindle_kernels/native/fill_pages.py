"""Pages copied into their places by one call for all layers: XLA would compile an operation for each page and layer.

That program is the first one that a restarted session runs, and it took 1.3 s to compile (135M, 4 pages at a time).
With a single call it takes 0.07 s. Written without numba, for the same reason as `zeros`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

import numpy as np

from rekindle_kernels.native.layout import consecutive
from rekindle_kernels.native.python_handlers import HANDLER, address_of, asks_version, data, read
from rekindle_kernels.native.xla_abi import CALL_FRAME

NAME = "fill"
# How many pages, of how many arrays in each of how many layers. Bytes of a page of each of these arrays follow.
PLAN = consecutive("Fill", dict.fromkeys(("pages", "layers", "arrays"), "int32"))
PLAN_OPERAND, IDS, FIRST = range(3)  # operands; from FIRST on the layers' arrays, then the pages' arrays
# Unlike ctypes.memmove this keeps the GIL, since a copy is shorter than waiting for it again.
_copy = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def supported() -> bool:
    """True if XLA can be given this kernel."""
    return os.environ.get("REKINDLE_NATIVE", "1") != "0" and sys.platform != "win32"


def plan(pages: int, layers: int, sizes: Sequence[int]) -> np.ndarray:
    """Return the operand that says what there is; `sizes` are the bytes of a page of each of a layer's arrays."""
    record = PLAN.pack({"pages": pages, "layers": layers, "arrays": len(sizes)})
    return np.concatenate([record, np.array(sizes, np.int32)])


@HANDLER
def _handle(frame: int) -> int:
    """Handle `(plan, ids int32 [n], arrays of each layer …, arrays of each page …) -> arrays of each layer …`, in
    place.

    Array a of a page holds its part of every layer, one after the other.
    """
    if asks_version(frame):
        return 0
    at = data(frame, "operands", PLAN_OPERAND)
    pages, layers, arrays = (read(PLAN, at, name) for name in ("pages", "layers", "arrays"))
    sizes = (ctypes.c_int32 * arrays).from_address(at + PLAN.size)
    ids = (ctypes.c_int32 * pages).from_address(data(frame, "operands", IDS))
    count = layers * arrays
    assert read(CALL_FRAME, frame, "result_count") == count
    targets = [data(frame, "results", index) for index in range(count)]
    for page in range(pages):
        for array in range(arrays):
            size = sizes[array]
            source = data(frame, "operands", FIRST + count + page * arrays + array)
            for layer in range(layers):
                _copy(targets[layer * arrays + array] + ids[page] * size, source + layer * size, size)
    return 0


def address() -> int:
    """Return the address of the function that XLA calls."""
    return address_of(_handle)
