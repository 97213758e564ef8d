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

NAME = "zeros"
PAGE = mmap.PAGESIZE
# Words of XLA's call frame, and of its records of buffers; target.py has more of them.
_EXTENSION, _OPERANDS, _RESULT_COUNT, _RESULTS, _DATA, _RANK, _DIMS = 1, 9, 12, 14, 3, 4, 5
_KIND, _NEXT, _METADATA = 2, 2, 1


def supported() -> bool:
    """Where giving pages back makes them zero: MADV_DONTNEED promises that on Linux alone."""
    wanted = os.environ.get("REKINDLE_NATIVE", "1") != "0"
    return wanted and sys.platform == "linux" and hasattr(mmap, "MADV_DONTNEED")


def _word(address: int, index: int) -> int:
    return ctypes.c_int64.from_address(address + 8 * index).value


@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
def _handle(frame: int) -> int:
    """`(bytes per element int32 [n]) -> n buffers of zeros`."""
    extension = _word(frame, _EXTENSION)
    while extension:
        if ctypes.c_int32.from_address(extension + 4 * _KIND).value == _METADATA:
            # XLA asks for the version of its interface that this was written for: 0.1
            version = (ctypes.c_int32 * 3).from_address(_word(extension, 3) + 4 * 6)
            version[:] = [0, 1, 0]
            return 0
        extension = _word(extension, _NEXT)
    count = _word(frame, _RESULT_COUNT)
    sizes = (ctypes.c_int32 * count).from_address(_word(_word(_word(frame, _OPERANDS), 0), _DATA))
    for index in range(count):
        result = _word(_word(frame, _RESULTS), index)
        dims = _word(result, _DIMS)
        clear(_word(result, _DATA), sizes[index] * prod(_word(dims, axis) for axis in range(_word(result, _RANK))))
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
    """Of the function that XLA calls."""
    pointer = ctypes.cast(_handle, ctypes.c_void_p).value
    assert pointer is not None, "a callback without an address"
    return pointer
