"""Zeroed memory that was never written: the system gives zero pages at first touch, XLA would pass over all of it.

Gigabytes of KV pages cost half a second and their whole resident size at the start of every process, although most are
never used in it. XLA has to own the memory all the same: what it borrows it copies as soon as it is donated. So XLA
allocates, and this gives the pages back to the system. Written without numba, since every session starts with it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from math import prod

from rekindle_kernels.native.layout import WORD, Layout
from rekindle_kernels.native.xla_abi import API_VERSION, BUFFER, CALL_FRAME, EXTENSION, METADATA, METADATA_KIND

NAME = "zeros"
PAGE = mmap.PAGESIZE


def supported() -> bool:
    """Whether the system replaces pages that are given back by zeros: MADV_DONTNEED promises it on Linux alone."""
    wanted = os.environ.get("REKINDLE_NATIVE", "1") != "0"
    return wanted and sys.platform == "linux" and hasattr(mmap, "MADV_DONTNEED")


def _read(layout: Layout, address: int, name: str) -> int:
    """A field of the record at `address`."""
    offset, kind = layout.fields[name]
    number = ctypes.c_int32 if kind == "int32" else ctypes.c_int64
    return number.from_address(address + offset).value


def _buffer(array: int, index: int) -> int:
    """The address of a buffer's record, from an array of such addresses."""
    return ctypes.c_int64.from_address(array + WORD * index).value


@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
def _handle(frame: int) -> int:
    """`(bytes per element int32 [n]) -> n buffers of zeros`."""
    extension = _read(CALL_FRAME, frame, "extension")
    while extension:
        if _read(EXTENSION, extension, "kind") == METADATA_KIND:
            answer = _read(EXTENSION, extension, "metadata") + METADATA.offset("major")
            (ctypes.c_int32 * 3).from_address(answer)[:] = list(API_VERSION)
            return 0
        extension = _read(EXTENSION, extension, "next")
    count = _read(CALL_FRAME, frame, "result_count")
    operand = _buffer(_read(CALL_FRAME, frame, "operands"), 0)
    sizes = (ctypes.c_int32 * count).from_address(_read(BUFFER, operand, "data"))
    for index in range(count):
        result = _buffer(_read(CALL_FRAME, frame, "results"), index)
        shape = (ctypes.c_int64 * _read(BUFFER, result, "rank")).from_address(_read(BUFFER, result, "dims"))
        clear(_read(BUFFER, result, "data"), sizes[index] * prod(shape))
    return 0


def clear(address: int, size: int) -> None:
    """Make `size` bytes zero, whole pages of them by giving them back."""
    libc = ctypes.CDLL(None)
    start, stop = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
    whole = ctypes.c_void_p(start), ctypes.c_size_t(stop - start)
    if stop <= start or libc.madvise(*whole, mmap.MADV_DONTNEED):  # locked memory can't be given back
        ctypes.memset(address, 0, size)
        return
    if hasattr(mmap, "MADV_HUGEPAGE"):
        libc.madvise(*whole, mmap.MADV_HUGEPAGE)
    ctypes.memset(address, 0, start - address)
    ctypes.memset(stop, 0, address + size - stop)


def address() -> int:
    """The address of the function that XLA calls."""
    pointer = ctypes.cast(_handle, ctypes.c_void_p).value
    assert pointer is not None, "a callback without an address"
    return pointer
