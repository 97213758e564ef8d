"""Windows's forms of `rekindle_kernels.system`."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import msvcrt
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from ctypes import c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

assert sys.platform == "win32", "other systems have posix.py"

PATIENCE = 2.0  # seconds in which another program's handle, such as a virus scanner's, keeps a file from being replaced
_LOCKED = 1 << 30  # the byte that stands for the file: Windows keeps others from reading and writing what is locked
_CREATE_NEW, _CREATE_ALWAYS, _OPEN_EXISTING, _OPEN_ALWAYS, _TRUNCATE_EXISTING = 1, 2, 3, 4, 5
_READ, _WRITE = 0x80000000, 0x40000000
_ALL_SHARED = 1 | 2 | 4  # others may read, write, and remove or rename
_RESERVED_AND_COMMITTED, _READ_AND_WRITE, _EXECUTE_AND_READ = 0x3000, 0x04, 0x20
_MEMORY_LIMIT, _LIMITS = 0x100, 9  # JOB_OBJECT_LIMIT_PROCESS_MEMORY, JobObjectExtendedLimitInformation
_NO_HANDLE = c_void_p(-1).value
_ending: threading.Timer | None = None


class _MemoryStatus(ctypes.Structure):
    """The figures that GlobalMemoryStatusEx fills in."""

    _fields_ = (
        ("length", c_uint32),
        ("load", c_uint32),
        ("total", c_uint64),
        ("available", c_uint64),
        ("others", c_uint64 * 5),
    )


class _MemoryCounters(ctypes.Structure):
    """The figures that GetProcessMemoryInfo fills in."""

    _fields_ = (("length", c_uint32), ("faults", c_uint32), ("peak", c_size_t), ("others", c_size_t * 7))


class _JobLimits(ctypes.Structure):
    """The limits that SetInformationJobObject reads, JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""

    _fields_ = (
        ("times", c_int64 * 2),
        ("flags", c_uint32),
        ("working_set", c_size_t * 2),
        ("processes", c_uint32),
        ("affinity", c_size_t),
        ("classes", c_uint32 * 2),
        ("transfers", c_uint64 * 6),
        ("process_memory", c_size_t),
        ("job_memory", c_size_t),
        ("peaks", c_size_t * 2),
    )


@cache
def _kernel32() -> Any:
    library: Any = ctypes.WinDLL("kernel32", use_last_error=True)
    for function in (library.CreateFileW, library.CreateJobObjectW, library.GetCurrentProcess, library.VirtualAlloc):
        function.restype = c_void_p
    library.CreateFileW.argtypes = [ctypes.c_wchar_p, *[c_uint32] * 2, c_void_p, *[c_uint32] * 2, c_void_p]
    library.CreateJobObjectW.argtypes = [c_void_p, ctypes.c_wchar_p]
    library.SetInformationJobObject.argtypes = [c_void_p, ctypes.c_int, c_void_p, c_uint32]
    library.AssignProcessToJobObject.argtypes = [c_void_p, c_void_p]
    library.CloseHandle.argtypes = [c_void_p]
    library.K32GetProcessMemoryInfo.argtypes = [c_void_p, c_void_p, c_uint32]
    library.VirtualAlloc.argtypes = [c_void_p, c_size_t, c_uint32, c_uint32]
    library.VirtualProtect.argtypes = [c_void_p, c_size_t, c_uint32, c_void_p]
    return library


def owner() -> tuple[int, int] | None:
    """Return None: access lists say who may write a file, and a user's own folders have one without other users."""
    return None


def open_file(path: Path, flags: int, mode: int = 0o600) -> int:
    """Return a descriptor, as `os.open` does. Raise OSError (ELOOP) where `path` is a symbolic link.

    Other processes may remove, rename or replace the file meanwhile, and none that is started inherits the descriptor.
    """
    if os.path.islink(path):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    access = {os.O_WRONLY: _WRITE, os.O_RDWR: _READ | _WRITE}.get(flags & (os.O_WRONLY | os.O_RDWR), _READ)
    if flags & os.O_CREAT:
        how = _CREATE_NEW if flags & os.O_EXCL else _CREATE_ALWAYS if flags & os.O_TRUNC else _OPEN_ALWAYS
    else:
        how = _TRUNCATE_EXISTING if flags & os.O_TRUNC else _OPEN_EXISTING
    handle = _kernel32().CreateFileW(str(path), access, _ALL_SHARED, None, how, 0x80, None)
    if handle == _NO_HANDLE:
        raise _error(path)
    try:
        return msvcrt.open_osfhandle(handle, flags | os.O_BINARY | os.O_NOINHERIT)
    except OSError:
        _kernel32().CloseHandle(handle)
        raise


def read_at(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
    """Read from byte `offset` of a file into the views; return how many bytes, 0 at the end of the file."""
    count = 0
    with open(descriptor, "rb", buffering=0, closefd=False) as file:  # one thread at a time has the descriptor
        file.seek(offset)
        for view in views:
            part = file.readinto(view)
            count += part
            if part < len(view):
                break
    return count


def try_lock(descriptor: int) -> bool:
    """Lock a file until its descriptor is closed or the process ends; False if another descriptor holds the lock.

    Raise OSError where nothing can be locked. All who want the lock have to ask for it: reads and writes go on.
    """
    at = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        os.lseek(descriptor, _LOCKED, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except PermissionError:
        return False
    finally:
        os.lseek(descriptor, at, os.SEEK_SET)
    return True


def try_lease(descriptor: int) -> bool:
    """Return False: there are no leases."""
    return False


def is_lease_breaking(descriptor: int) -> bool:
    """Return True: Windows has no leases, so any file may be written to by another process."""
    return True


def end_lease(descriptor: int) -> None:
    """Do nothing: there are no leases."""


def nameless_file(size: int) -> int:
    """Raise OSError: two processes share memory by names here, which others could open, too."""
    raise OSError(errno.ENOSYS, "this system has no files without a name")


def open_nameless(process: int, file: int, size: int) -> int:
    """Raise OSError: Windows has no memory that another process opens by a descriptor."""
    raise OSError(errno.ENOSYS, "this system has no files without a name")


def replace(source: Path, target: Path) -> None:
    """Rename a file or folder; a file that has the name `target` is replaced in the same instant.

    While another program has one of the two open, Windows refuses: it is tried again for `PATIENCE` seconds.
    """
    end, pause = time.monotonic() + PATIENCE, 0.001
    while True:
        try:
            os.replace(source, target)
        except PermissionError:
            if time.monotonic() + pause > end:
                raise
            time.sleep(pause)
            pause *= 2
        else:
            return


def sync(path: Path) -> None:
    """Return once the content of a file would survive a power cut. Raise OSError.

    The names in a folder survive by NTFS's journal. A file that this user can't write is left as it is.
    """
    if path.is_dir():
        return
    with contextlib.suppress(PermissionError):
        descriptor = open_file(path, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def anonymous_memory(size: int) -> mmap.mmap:
    """Return zeroed memory of `size` bytes that begins with a page, huge ones where the system has them on request.

    Pages that are never touched take no memory.
    """
    return mmap.mmap(-1, size)


def advise_huge_pages(address: int, size: int) -> None:
    """Do nothing: large pages need a privilege that users don't have."""


def give_back(address: int, size: int) -> bool:
    """Return False: Windows takes no pages of a mapping back, and their content is as it was."""
    return False


def code_memory(size: int) -> memoryview:
    """Return memory for machine code, in whole pages and until the process ends."""
    whole = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
    address = _kernel32().VirtualAlloc(None, whole, _RESERVED_AND_COMMITTED, _READ_AND_WRITE)
    if not address:
        raise ctypes.WinError(ctypes.get_last_error())
    return memoryview((ctypes.c_char * whole).from_address(address)).cast("B")


def make_executable(memory: memoryview) -> None:
    """Have `code_memory` read and executed, and written no more. Raise OSError."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if not _kernel32().VirtualProtect(address, len(memory), _EXECUTE_AND_READ, ctypes.byref(c_uint32())):
        raise ctypes.WinError(ctypes.get_last_error())


def total_memory() -> int:
    """Return the bytes of memory of this machine."""
    return int(_memory_status().total)


def free_memory() -> int | None:
    """Return the bytes that programs may still take, as the system itself reports them."""
    return int(_memory_status().available)


def _memory_status() -> _MemoryStatus:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if not _kernel32().GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("Windows did not report its memory: pass device_memory")
    return status


def peak_memory() -> int:
    """Return the largest resident size of this process in bytes."""
    counters = _MemoryCounters(length=ctypes.sizeof(_MemoryCounters))
    own = _kernel32().GetCurrentProcess()
    if not _kernel32().K32GetProcessMemoryInfo(own, ctypes.byref(counters), counters.length):
        raise ctypes.WinError(ctypes.get_last_error())
    return int(counters.peak)


def address_space_limit() -> int | None:
    """Return None: Windows has no such limit."""
    return None


def limit_memory(more: int) -> None:
    """Limit this process to `more` bytes in addition to its current ones, by adding it to a job with that limit."""
    kernel = _kernel32()
    limits = _JobLimits(flags=_MEMORY_LIMIT, process_memory=peak_memory() + more)
    job = kernel.CreateJobObjectW(None, None)  # ends with the process
    if job and kernel.SetInformationJobObject(job, _LIMITS, ctypes.byref(limits), ctypes.sizeof(limits)):
        kernel.AssignProcessToJobObject(job, kernel.GetCurrentProcess())


def forbid_core_dumps() -> None:
    """Suppress the error dialog and the crash report of this process, which would wait for a user."""
    _kernel32().SetErrorMode(0x0001 | 0x0002)  # SEM_FAILCRITICALERRORS, SEM_NOGPFAULTERRORBOX


def end_after(seconds: float) -> None:
    """End this process in so many seconds; 0: no more. A library that keeps Python's lock delays it."""
    global _ending
    if _ending is not None:
        _ending.cancel()
    _ending = threading.Timer(seconds, os._exit, [1]) if seconds else None
    if _ending is not None:
        _ending.daemon = True
        _ending.start()


def end_after_processor_time(seconds: float) -> None:
    """Do nothing: the process that started this one ends it, by a clock."""


def most_descriptors() -> int | None:
    """Return how many files and connections this process should have open; Windows itself has no limit."""
    return 1_170


def own_group() -> dict[str, Any]:
    """Return options of `subprocess.Popen` for a process that Ctrl-C in this one's terminal does not reach."""
    return {"creationflags": 0x200}  # CREATE_NEW_PROCESS_GROUP


def kill(process: int) -> None:
    """End another process, whatever it does. Raise OSError if there is none, or it is another user's."""
    os.kill(process, signal.SIGTERM)  # TerminateProcess


def send_views(connection: socket.socket, views: Sequence[memoryview]) -> int:
    """Send bytes of the views, in their order and at least one; return how many."""
    return connection.send(views[0])


def receive_into(connection: socket.socket, views: Sequence[memoryview]) -> int:
    """Receive bytes into the views, in their order; return how many, 0 if the other side has closed the connection."""
    return connection.recv_into(views[0])


def reuse_address(listening: socket.socket) -> None:
    """Let a socket listen at an address right after its last listener ended, but never at an address in use."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)  # SO_REUSEADDR would take another one's


@contextlib.contextmanager
def echo_off(file: int) -> Iterator[None]:
    """Do nothing: a Windows console shows typed input when it is read."""
    yield


def _error(path: Path) -> OSError:
    error = ctypes.WinError(ctypes.get_last_error())
    error.filename = str(path)
    return error
