"""Handlers written in Python that XLA calls: memory of zeros, and pages copied into their places.

What every session needs at its start is not left to a compiler. Such a handler takes the GIL, so it does little.

Zeroed memory was never written: the system gives zero pages at first touch, XLA would pass over all of it. Gigabytes of
KV pages cost half a second and their whole resident size at the start of every process, although most are never used in
it. XLA has to own the memory all the same: what it borrows it copies as soon as it is donated. So XLA allocates, and
this gives the pages back to the system.

Pages are copied into their places by one call for all layers: XLA would compile an operation for each page and layer.
That program is the first one that a restarted session runs, and it took 1.3 s to compile (135M, 4 pages at a time).
With a single call it takes 0.07 s.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from rekindle_kernels import system
from rekindle_kernels.native.layout import (
    API_VERSION,
    BUFFER,
    CALL_FRAME,
    EXTENSION,
    METADATA,
    METADATA_KIND,
    WORD,
    RecordLayout,
    consecutive,
)

ZEROS, FILL = "zeros", "fill"  # names of kernels
HANDLER = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
PAGE = mmap.PAGESIZE
SMALL = 1 << 20  # bytes of zeros that stay on small pages: a huge one of each layer was 56 MB for the first token
# Of a fill: how many pages, of how many arrays in each of how many layers. Each array's bytes per page follow.
PLAN = consecutive("Fill", dict.fromkeys(("pages", "layers", "arrays"), "int32"))
PLAN_OPERAND, IDS, FIRST = range(3)  # operands; from FIRST on the layers' arrays, then the pages' arrays


def read(layout: RecordLayout, address: int, name: str) -> int:
    """Return a field of the record at `address`."""
    offset, kind = layout.fields[name]
    number = ctypes.c_int32 if kind == "int32" else ctypes.c_int64
    return number.from_address(address + offset).value


def asks_version(frame: int) -> bool:
    """True if XLA only asks for the version of its interface that this was written for; then it is answered."""
    extension = read(CALL_FRAME, frame, "extension")
    while extension:
        if read(EXTENSION, extension, "kind") == METADATA_KIND:
            answer = read(EXTENSION, extension, "metadata") + METADATA.offset("major")
            (ctypes.c_int32 * 3).from_address(answer)[:] = list(API_VERSION)
            return True
        extension = read(EXTENSION, extension, "next")
    return False


def buffer(frame: int, side: str, index: int) -> int:
    """Return the address of the record of an operand or result; `side` is "operands" or "results"."""
    return ctypes.c_int64.from_address(read(CALL_FRAME, frame, side) + WORD * index).value


def data(frame: int, side: str, index: int) -> int:
    """Return the address of the data of an operand or result."""
    return read(BUFFER, buffer(frame, side, index), "data")


def may_run() -> bool:
    """True if handlers may be called on this system: on Windows, where none was called yet, only if that is asked
    for."""
    return sys.platform != "win32" or os.environ.get("REKINDLE_NATIVE") == "1"


def has_zeros() -> bool:
    """True if the system replaces pages that are given back by zeros: MADV_DONTNEED promises it on Linux alone."""
    wanted = os.environ.get("REKINDLE_NATIVE", "1") != "0"
    return wanted and sys.platform == "linux"


@HANDLER
def _zeros(frame: int) -> int:
    """Handle `(bytes per element int32 [n]) -> n buffers of zeros`."""
    if asks_version(frame):
        return 0
    count = read(CALL_FRAME, frame, "result_count")
    sizes = (ctypes.c_int32 * count).from_address(data(frame, "operands", 0))
    for index in range(count):
        result = buffer(frame, "results", index)
        shape = (ctypes.c_int64 * read(BUFFER, result, "rank")).from_address(read(BUFFER, result, "dims"))
        clear(read(BUFFER, result, "data"), sizes[index] * prod(shape))
    return 0


def clear(address: int, size: int) -> None:
    """Make `size` bytes zero, whole pages of them by giving them back."""
    start, stop = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
    if stop <= start or not system.give_back(start, stop - start):
        ctypes.memset(address, 0, size)
        return
    if stop - start > SMALL:
        system.advise_huge_pages(start + SMALL, stop - start - SMALL)
    ctypes.memset(address, 0, start - address)
    ctypes.memset(stop, 0, address + size - stop)


# Unlike ctypes.memmove this keeps the GIL, since a copy is shorter than waiting for it again.
_copy = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def has_fill() -> bool:
    """True if XLA can call the handler that fills pages."""
    return os.environ.get("REKINDLE_NATIVE", "1") != "0" and may_run()


def fill_plan(pages: int, layers: int, sizes: Sequence[int]) -> np.ndarray:
    """Return the first operand of a fill; `sizes` are the bytes of a page of each of a layer's arrays."""
    record = PLAN.pack({"pages": pages, "layers": layers, "arrays": len(sizes)})
    return np.concatenate([record, np.array(sizes, np.int32)])


@HANDLER
def _fill(frame: int) -> int:
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


HANDLERS: dict[str, Any] = {ZEROS: _zeros, FILL: _fill}


def address_of(handler: Any) -> int:
    """Return the address of a handler."""
    pointer = ctypes.cast(handler, ctypes.c_void_p).value
    assert pointer is not None, "a callback without an address"
    return pointer
