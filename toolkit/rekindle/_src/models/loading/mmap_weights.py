"""Weights used where their file is mapped, and moved to huge pages after a while, at the same addresses.

Mapping a file takes no time, and content in the page cache is used where it is. Copying 700 MB of it into memory of
our own takes 0.1 s, and was seen to take 1.8 s in a virtual machine that gets its memory page by page.

The page cache has small pages, though: decoding one to eight sequences with weights of 270 MB took 3 to 8 % longer
than on huge ones. So once the session has begun, a thread copies piece after piece to huge pages and has the system
put these in the place of the file's, in one go: readers notice nothing.

A lease keeps other processes from writing to the file and from cutting it off: reading mapped memory past the end of
a file that was cut off ends the process (SIGBUS). A process that opens the file for writing or truncates it has to
wait, 45 s unless /proc/sys/fs/lease-break-time says otherwise, and `is_breaking` tells the holder. Removing or
renaming the file needs no lease: mapped pages stay. No signal handler takes part.

The same thread watches the file's lease. When another process wants to write to the file, everything is copied at
once, whether there are huge pages or not, and then the lease is released: the file may be cut off, and no read can
fault. Three cases remain: a file system without leases, a Linux before 5.7, and a limit on memory that forbids the
copy. There a file that its own user cuts off while it is mapped still ends the process; other users can't write to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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

from rekindle._src.core.memory import available
from rekindle._src.models.loading.hugepages import huge_pages
from rekindle_kernels import system

PIECE = 32 << 20  # bytes that are moved at a time
DELAY = 5.0  # seconds that a new session has the machine to itself
SHARE = 0.25  # the part of the time after that for moving pieces
WATCH = 1.0  # seconds between two looks at a lease, which Linux waits 45 s for
KINDS = Path("/sys/kernel/mm/transparent_hugepage/enabled")
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
# File systems with files that stay readable while they are open, even after they were deleted.
LOCAL = frozenset(("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "reiserfs", "tmpfs", "xfs", "zfs"))
_FIXED = 0x10  # MAP_FIXED
INTO_PLACE = 1 | 2 | 4  # MREMAP_MAYMOVE, _FIXED, _DONTUNMAP: memory that was moved away stays mapped, and is empty
_POPULATE_READ = 22  # MADV_POPULATE_READ
_FAILED = ctypes.c_void_p(-1).value
Bytes = NDArray[np.uint8]


class FileLease:
    """A lease held until `release`, or until Linux takes it from a holder that is too slow to release it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def is_breaking(self) -> bool:
        """True if another process waits to write to the file, or no longer has to."""
        return self._descriptor is None or system.is_lease_breaking(self._descriptor)

    def release(self) -> None:
        """Let others write to it; may be called again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            system.end_lease(descriptor)
            os.close(descriptor)


def take_lease(path: Path) -> FileLease | None:
    """Return a lease, or None where the system or the file system has none.

    Raise OSError if the file is not this user's alone.
    """
    descriptor = system.open_file(path, os.O_RDONLY)
    try:
        leased = system.try_lease(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    if leased:
        return FileLease(descriptor)
    os.close(descriptor)
    return None


def view(path: Path) -> Bytes:
    """Return the bytes of a file that is not changed any more. Raise `OSError` where it has to be read instead."""
    if sys.platform == "win32":  # a mapped file can't be deleted there
        raise OSError("mapped files can't be deleted")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if sys.platform != "linux":
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        if file_system(path) not in LOCAL:
            raise OSError(f"{path} is not on a disk of this machine: it could go while it is used")
        memory = huge_pages(size)  # a place where huge pages can go; the file takes it first
        flags = mmap.MAP_PRIVATE | _FIXED
        if libc().mmap(memory.ctypes.data, size, mmap.PROT_READ, flags, file.fileno(), 0) == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory.flags.writeable = False
    return memory


def bring(part: NDArray[Any]) -> None:
    """Read a part of a view from disk now. Raise `OSError` if that fails; touching the part would end the process."""
    if sys.platform == "linux":
        first = part.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        if libc().madvise(first, part.ctypes.data + part.nbytes - first, _POPULATE_READ):
            number = ctypes.get_errno()
            if number != errno.EINVAL:  # before Linux 5.14
                raise OSError(number, os.strerror(number))


def move_later(memory: Bytes, lease: FileLease | None = None) -> threading.Thread | None:
    """Start a thread that moves a `view` to huge pages in a while, or as soon as its `lease` breaks.

    It does nothing if the view is no longer used then, and releases the lease in the end. Return None where there is
    nothing to do.
    """
    if lease is None and not worthwhile(memory.nbytes):
        return None
    owner, place, size = weakref.ref(_owner(memory)), memory.ctypes.data, memory.nbytes
    thread = threading.Thread(target=_move, args=(owner, place, size, lease), name="rekindle huge pages", daemon=True)
    thread.start()
    return thread


def _move(owner: weakref.ref[Bytes], place: int, size: int, lease: FileLease | None) -> None:
    try:
        _move_pieces(owner, place, size, lease)
    finally:
        if lease is not None:
            lease.release()


def _move_pieces(owner: weakref.ref[Bytes], place: int, size: int, lease: FileLease | None) -> None:
    pause, start = DELAY, 0
    staging: Bytes | None = None
    while start < size:
        breaking = _wait(pause, owner, lease)
        array = owner()  # a reference, so that it stays mapped for this piece
        if array is None or (breaking and not _movable()):
            return
        if not breaking and not worthwhile(size - start):
            if lease is None:
                return
            pause = WATCH
            del array
            continue
        began = time.perf_counter()
        count = min(PIECE, size - start)
        staging = huge_pages(PIECE) if staging is None else staging
        ctypes.memmove(staging.ctypes.data, place + start, count)
        whole = -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
        if libc().mremap(staging.ctypes.data, whole, whole, INTO_PLACE, place + start) == _FAILED:
            return  # before Linux 5.7, which has not touched the place
        pause = (time.perf_counter() - began) * (1 / SHARE - 1)
        start += count
        del array


def _wait(seconds: float, owner: weakref.ref[Bytes], lease: FileLease | None) -> bool:
    """Sleep for `seconds`, or until the lease breaks or the memory is unused. Return True if the lease breaks."""
    if lease is None:
        time.sleep(seconds)
        return False
    end = time.monotonic() + seconds
    while not lease.is_breaking():
        left = end - time.monotonic()
        if left <= 0 or owner() is None:
            return False
        time.sleep(min(left, WATCH))
    return True


def file_system(path: Path) -> str:
    """Return the type of the file system that `path` is on, "" if it is unknown."""
    mounts = dict[Path, str]()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            mounts[Path(before.split()[4].replace("\\040", " "))] = after.split()[0]
    real = path.resolve()
    return next((mounts[folder] for folder in real.parents if folder in mounts), "")


def _owner(memory: Bytes) -> Bytes:
    """Return the array that every view of this memory keeps alive."""
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    return memory


def worthwhile(size: int) -> bool:
    """True if there are huge pages, and room for them."""
    if not _movable():
        return False
    try:
        disabled = "[never]" in KINDS.read_text()
    except OSError:
        return False
    room = available()
    return not disabled and room is not None and room > size + size // 4


def _movable() -> bool:
    """True if memory can be put in the place of a file's. A limit that the system hits half-way would leave a hole."""
    if sys.platform != "linux":
        return False
    import resource

    try:
        strict = OVERCOMMIT.read_text().strip() == "2"
    except OSError:
        return False
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return not strict and {*limits} == {resource.RLIM_INFINITY}


@cache
def libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t
    library.mmap.argtypes = [ctypes.c_void_p, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    library.mremap.argtypes = [ctypes.c_void_p, size, size, ctypes.c_int, ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, size, ctypes.c_int]
    library.mmap.restype = library.mremap.restype = ctypes.c_void_p
    return library
