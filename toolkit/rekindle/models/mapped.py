"""A file as memory without reading it, and after a while on huge pages, at the same addresses.

Mapping a file is done at once, and what lies in the page cache is found there. Copying 700 MB of it into memory of
one's own takes 0.1 s, and was seen to take 1.8 s in a virtual machine that is lent its memory page by page.

The page cache has small pages, though: decoding one to four sequences with weights of 270 MB took 4 to 9 % longer than
on huge ones. So once the session has begun, a thread copies piece after piece to huge pages and has the system put
these where the file's were. It does so at once, so that whoever reads there meanwhile notices nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.models.slabs import huge_pages

PIECE = 32 << 20  # bytes that are moved at a time
DELAY = 5.0  # seconds in which a new session has the machine to itself
SHARE = 0.25  # of the time after that, in which pieces are moved

_FIXED = 0x10  # MAP_FIXED
_INTO_PLACE = 1 | 2 | 4  # MREMAP_MAYMOVE, _FIXED, _DONTUNMAP: memory that was moved away stays mapped, and is empty
_FAILED = ctypes.c_void_p(-1).value
Bytes = NDArray[np.uint8]


def view(path: Path) -> Bytes:
    """The bytes of a file that nobody changes any more. `OSError` where files can't be mapped."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if sys.platform != "linux":
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        memory = huge_pages(size)  # a place where huge pages can go; the file takes it first
        place = memory.ctypes.data
        if _libc().mmap(place, size, mmap.PROT_READ, mmap.MAP_PRIVATE | _FIXED, file.fileno(), 0) == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    memory.flags.writeable = False
    return memory


def move_later(memory: Bytes) -> threading.Thread | None:
    """Begin to move a `view` to huge pages in a while, if it is still used then. None where that is of no use."""
    if not _worthwhile(memory.nbytes):
        return None
    owner, place, size = weakref.ref(_owner(memory)), memory.ctypes.data, memory.nbytes
    thread = threading.Thread(target=_move, args=(owner, place, size), name="rekindle huge pages", daemon=True)
    thread.start()
    return thread


def _move(owner: weakref.ref[Bytes], place: int, size: int) -> None:
    pause, staging = DELAY, huge_pages(PIECE)
    for start in range(0, size, PIECE):
        time.sleep(pause)
        used = owner()  # a reference, so that it stays mapped for this piece
        if used is None:
            return
        began = time.perf_counter()
        count = min(PIECE, size - start)
        ctypes.memmove(staging.ctypes.data, place + start, count)
        whole = -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
        if _libc().mremap(staging.ctypes.data, whole, whole, _INTO_PLACE, place + start) == _FAILED:
            return  # before Linux 5.7
        pause = (time.perf_counter() - began) * (1 / SHARE - 1)
        del used


def _owner(memory: Bytes) -> Bytes:
    """The array that every view of this memory keeps alive."""
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    return memory


def _worthwhile(size: int) -> bool:
    """Whether there are huge pages, and room for them without a limit that could be met half-way."""
    if sys.platform != "linux":
        return False
    import resource

    try:
        kinds = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        strict = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return "[never]" not in kinds and not strict and not limited and available() > 2 * size


def available() -> int:
    """Bytes of memory that the system could give to programs now."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t
    library.mmap.argtypes = [ctypes.c_void_p, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    library.mremap.argtypes = [ctypes.c_void_p, size, size, ctypes.c_int, ctypes.c_void_p]
    library.mmap.restype = library.mremap.restype = ctypes.c_void_p
    return library
