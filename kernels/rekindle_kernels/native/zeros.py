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

from rekindle_kernels.native.python_handlers import HANDLER, address_of, asks_version, buffer, data, read
from rekindle_kernels.native.xla_abi import BUFFER, CALL_FRAME

NAME = "zeros"
PAGE = mmap.PAGESIZE
SMALL = 1 << 20  # bytes that stay on small pages: a huge one of each layer was 56 MB for the first token


def supported() -> bool:
    """True if the system replaces pages that are given back by zeros: MADV_DONTNEED promises it on Linux alone."""
    wanted = os.environ.get("REKINDLE_NATIVE", "1") != "0"
    return wanted and sys.platform == "linux" and hasattr(mmap, "MADV_DONTNEED")


@HANDLER
def _handle(frame: int) -> int:
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
    libc = ctypes.CDLL(None)
    start, stop = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
    whole = ctypes.c_void_p(start), ctypes.c_size_t(stop - start)
    if stop <= start or libc.madvise(*whole, mmap.MADV_DONTNEED):  # locked memory can't be given back
        ctypes.memset(address, 0, size)
        return
    if hasattr(mmap, "MADV_HUGEPAGE") and stop - start > SMALL:
        libc.madvise(ctypes.c_void_p(start + SMALL), ctypes.c_size_t(stop - start - SMALL), mmap.MADV_HUGEPAGE)
    ctypes.memset(address, 0, start - address)
    ctypes.memset(stop, 0, address + size - stop)


def address() -> int:
    """Return the address of the function that XLA calls."""
    return address_of(_handle)
