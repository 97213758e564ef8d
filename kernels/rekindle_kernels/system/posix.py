"""Linux's and macOS's forms of `rekindle_kernels.system`."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import signal
import socket
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

assert sys.platform != "win32", "Windows has windows.py"

_F_SETSIG = 10  # which signal tells the holder of a lease; SIGURG is ignored unless a program asks for it
_CANNOT_SYNC = frozenset({errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS, errno.ENOSYS, errno.ENOTSUP})


def owner() -> tuple[int, int] | None:
    """Return the user and group of this process; None on Windows, where access lists say who may write a file."""
    return os.getuid(), os.getgid()


def open_file(path: Path, flags: int, mode: int = 0o600) -> int:
    """Return a descriptor, as `os.open` does. Raise OSError (ELOOP) where `path` is a symbolic link.

    Other processes may remove, rename or replace the file meanwhile, and none that is started inherits the descriptor.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def read_at(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
    """Read from byte `offset` of a file into the views; return how many bytes, 0 at the end of the file."""
    return os.preadv(descriptor, views, offset)


def try_lock(descriptor: int) -> bool:
    """Lock a file until its descriptor is closed or the process ends; False if another descriptor holds the lock.

    Raise OSError where nothing can be locked. All who want the lock have to ask for it: reads and writes go on.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lease(descriptor: int) -> bool:
    """Have Linux keep other processes from writing to a file or cutting it off, until `end_lease`; it may be read.

    False where there are no leases. Raise OSError (EAGAIN, EACCES) if it is open for writing, or another user's.
    """
    if sys.platform != "linux":
        return False
    try:
        fcntl.fcntl(descriptor, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def is_lease_breaking(descriptor: int) -> bool:
    """True if another process waits to write to the file, or no longer has to."""
    return sys.platform != "linux" or fcntl.fcntl(descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK


def end_lease(descriptor: int) -> None:
    """Let others write to the file; a forked child may have the descriptor too, so that closing it is not enough."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def nameless_file(size: int) -> int:
    """Return a descriptor of memory that stays of this size, and that another process may open by its number.

    Raise OSError on systems without `memfd_create`.
    """
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):  # a Python made with an older C library lacks it
        raise OSError(errno.ENOSYS, "this system has no files without a name")
    descriptor = os.memfd_create("rekindle pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_nameless(process: int, file: int, size: int) -> int:
    """Return a descriptor of another process's `nameless_file`. Raise OSError if it has another size, or may shrink."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "this system has no files without a name")
    descriptor = os.open(f"/proc/{process}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != size:
            raise OSError("it has another size")
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("it could shrink")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def replace(source: Path, target: Path) -> None:
    """Rename a file or folder; a file that has the name `target` is replaced in the same instant."""
    os.replace(source, target)


def sync(path: Path) -> None:
    """Return once the content of a file, or the names in a folder, would survive a power cut. Raise OSError.

    A file system that can't sync, or a folder that this user can't open, is left as it is.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def anonymous_memory(size: int) -> mmap.mmap:
    """Return zeroed memory of `size` bytes that begins with a page, huge ones where the system has them on request.

    Pages that are never touched take no memory.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def advise_huge_pages(address: int, size: int) -> None:
    """Ask for huge pages, where the system has them on request, for memory that begins and ends with a page."""
    if sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


def give_back(address: int, size: int) -> bool:
    """Give whole pages of anonymous memory back to the system: on Linux they are zeros from then on.

    False where the system keeps them, as it does with locked memory; their content is then as it was.
    """
    failed: int = ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
    return not failed


def code_memory(size: int) -> memoryview:
    """Return memory for machine code, in whole pages and until the process ends."""
    whole = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
    return memoryview(mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def make_executable(memory: memoryview) -> None:
    """Have `code_memory` read and executed, and written no more. Raise OSError."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if protect(address, len(memory), mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "mprotect")


def total_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> int | None:
    """Return None: no call reports it. Linux has files that do, which `core.memory` reads."""
    return None


def peak_memory() -> int:
    """Return the largest resident size of this process in bytes."""
    with contextlib.suppress(OSError):  # ru_maxrss would include what the parent had before exec
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def address_space_limit() -> int | None:
    """Return how many bytes of addresses this process may have, as set by `ulimit -v`; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def limit_memory(more: int) -> None:
    """Limit this process to `more` bytes of addresses in addition to its current ones, where these are known."""
    with contextlib.suppress(OSError, ValueError):
        now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE
        _lower(resource.RLIMIT_AS, now + more)


def forbid_core_dumps() -> None:
    """Have this process leave no image of its memory if it crashes."""
    with contextlib.suppress(OSError, ValueError):
        _lower(resource.RLIMIT_CORE, 0)


def _lower(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]  # stays as it is
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def end_after(seconds: float) -> None:
    """End this process in so many seconds, whatever it does then; 0: no more. Only the main thread may call it."""
    signal.setitimer(signal.ITIMER_REAL, seconds)  # whose signal ends a process that has no handler


def end_after_processor_time(seconds: float) -> None:
    """End this process when it has used so many seconds of a processor; 0: no more."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def most_descriptors() -> int | None:
    """Return how many files and connections this process may have open; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def own_group() -> dict[str, Any]:
    """Return options of `subprocess.Popen` for a process that Ctrl-C in this one's terminal does not reach."""
    return {"process_group": 0}


def kill(process: int) -> None:
    """End another process, whatever it does. Raise OSError if there is none, or it is another user's."""
    os.kill(process, signal.SIGKILL)


def send_views(connection: socket.socket, views: Sequence[memoryview]) -> int:
    """Send bytes of the views, in their order and at least one; return how many."""
    return connection.sendmsg(views)


def receive_into(connection: socket.socket, views: Sequence[memoryview]) -> int:
    """Receive bytes into the views, in their order; return how many, 0 if the other side has closed the connection."""
    return connection.recvmsg_into(views)[0]


def reuse_address(listening: socket.socket) -> None:
    """Let a socket listen at an address right after its last listener ended, but never at an address in use."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


@contextlib.contextmanager
def echo_off(file: int) -> Iterator[None]:
    """Keep input typed meanwhile off the screen of a terminal, and through Ctrl-C. The next prompt shows it."""
    before, quiet = termios.tcgetattr(file), termios.tcgetattr(file)
    quiet[3] = quiet[3] & ~termios.ECHO | termios.NOFLSH
    termios.tcsetattr(file, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(file, termios.TCSANOW, before)
