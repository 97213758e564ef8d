"""`rekindle_kernels.system.windows` where there is no Windows: its functions over stand-ins for what Windows has.

The stand-ins do with POSIX's functions what Windows's documentation says of `CreateFileW`, of `_locking` and of the
figures of memory. As a plugin of pytest's (`pytest -p helpers.windows_forms FILES`) this takes from Python what it
lacks on Windows, and `sys.platform` is `win32`, before anything of rekindle is imported. Other packages are imported
before that, and stay Linux's. Shown is the order and kind of calls; what the system makes of them is not.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib.util
import mmap
import os
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import rekindle_kernels

# What Python has on POSIX alone, as far as rekindle's sources, or those of a test, could ask for it.
ABSENT: dict[Any, tuple[str, ...]] = {
    os: (
        "fork", "getegid", "geteuid", "getgid", "getppid", "getuid", "killpg", "memfd_create", "MFD_ALLOW_SEALING",
        "MFD_CLOEXEC", "mkfifo", "nice", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "pread", "preadv", "pwrite",
        "pwritev", "readv", "sched_getaffinity", "sched_setaffinity", "setpriority", "setsid", "sysconf",
        "writev",
    ),
    signal: ("alarm", "ITIMER_PROF", "ITIMER_REAL", "setitimer", "SIGHUP", "SIGPROF", "SIGURG", "SIGUSR1"),
    mmap: tuple(name for name in vars(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))),
}  # fmt: skip
MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
# Imported before: they ask which system this is, or have what is taken away.
OTHERS = (
    "jax", "jax.experimental.serialize_executable", "flax.nnx", "orbax.checkpoint", "anyio", "trio", "tokenizers",
    "safetensors.numpy", "jinja2", "asyncio", "multiprocessing", "subprocess", "tempfile", "shutil",
    "ipywidgets", "IPython", "anywidget", "psutil", "hypothesis", "pandas", "PIL.Image", "llguidance", "uvicorn",
    "fsspec", "ml_dtypes", "numba", "http.client", "pdb", "doctest", "getpass", "pathlib", "tarfile", "pty",
)  # fmt: skip
_CREATION = {1: os.O_CREAT | os.O_EXCL, 2: os.O_CREAT | os.O_TRUNC, 3: 0, 4: os.O_CREAT, 5: os.O_TRUNC}
_ERRORS = {errno.ENOENT: 2, errno.EACCES: 5, errno.EEXIST: 80, errno.EISDIR: 5, errno.ENOTDIR: 3}
_NUMBERS = {2: errno.ENOENT, 3: errno.ENOENT, 5: errno.EACCES, 80: errno.EEXIST}
_last_error = 0


class Kernel32:
    """A stand-in for the functions of kernel32 that `windows.py` calls, implemented with POSIX calls."""

    GlobalMemoryStatusEx: Any
    limits: Any = None

    def __init__(self) -> None:
        self.total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def CreateFileW(self, path: str, access: int, share: int, _: Any, how: int, flags: int, __: Any) -> int | None:  # noqa: N802
        global _last_error
        assert share == 7, "others may read, write and remove it"
        kind = {0x80000000: os.O_RDONLY, 0x40000000: os.O_WRONLY, 0xC0000000: os.O_RDWR}[access]
        if os.path.isdir(path):
            _last_error = 5
            return ctypes.c_void_p(-1).value
        try:
            return os.open(path, kind | _CREATION[how], 0o600)
        except OSError as error:
            _last_error = _ERRORS.get(error.errno or 0, 5)
            return ctypes.c_void_p(-1).value

    def CloseHandle(self, handle: int) -> int:  # noqa: N802
        os.close(handle)
        return 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self, f"_{name}")

    def _GlobalMemoryStatusEx(self, reference: Any) -> int:  # noqa: N802
        status = reference._obj
        assert status.length == ctypes.sizeof(status) == 64
        status.total, status.available = self.total, self.total // 2
        return 1

    def _GetCurrentProcess(self) -> int:  # noqa: N802
        return -1

    def _K32GetProcessMemoryInfo(self, process: int, reference: Any, length: int) -> int:  # noqa: N802
        assert length == ctypes.sizeof(reference._obj) == 72
        reference._obj.peak = 1 << 20
        return 1

    def _CreateJobObjectW(self, _: Any, __: Any) -> int:  # noqa: N802
        return 17

    def _SetInformationJobObject(self, job: int, kind: int, reference: Any, size: int) -> int:  # noqa: N802
        assert (job, kind, size) == (17, 9, 144)
        self.limits = reference._obj
        return 1

    def _AssignProcessToJobObject(self, job: int, process: int) -> int:  # noqa: N802
        return int((job, process) == (17, -1))

    def _SetErrorMode(self, mode: int) -> int:  # noqa: N802
        return 0


def _locking(descriptor: int, mode: int, count: int) -> None:
    """Lock as `_locking` does: from where the descriptor stands, against all other descriptors."""
    assert (mode, count) == (2, 1) and os.lseek(descriptor, 0, os.SEEK_CUR) == 1 << 30
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


def forms() -> Any:
    """Import `windows.py` over the stand-ins. The caller undoes nothing: other modules are as they were."""
    msvcrt: Any = types.ModuleType("msvcrt")
    msvcrt.LK_NBLCK, msvcrt.locking = 2, _locking
    msvcrt.open_osfhandle = lambda handle, flags: handle
    path = Path(rekindle_kernels.__file__).parent / "system" / "windows.py"
    spec = importlib.util.spec_from_file_location("rekindle_kernels.system.windows", path)
    assert spec is not None and spec.loader is not None
    windows = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "msvcrt", msvcrt)
        patch.setattr(sys, "platform", "win32")
        spec.loader.exec_module(windows)
    kernel32 = Kernel32()
    vars(windows)["_kernel32"] = lambda: kernel32
    for name, value in {"O_BINARY": 0, "O_NOINHERIT": os.O_CLOEXEC}.items():
        setattr(os, name, value)
    vars(ctypes).update(
        get_last_error=lambda: _last_error,
        WinError=lambda code: OSError(_NUMBERS[code], os.strerror(_NUMBERS[code])),
    )
    vars(socket)["SO_EXCLUSIVEADDRUSE"] = socket.SO_REUSEADDR
    return windows


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Take away what Windows does not have, before a folder's conftest.py imports rekindle."""
    import conftest  # noqa: F401  sets what jax reads when it is imported

    for name in OTHERS:
        importlib.import_module(name)
    from orbax.checkpoint import v1  # noqa: F401  a lazy attribute

    windows = forms()
    for module, names in ABSENT.items():
        for name in names:
            vars(module).pop(name, None)
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    early = [name for name in sys.modules if name.startswith(("rekindle_kernels.", "rekindle."))]
    assert early == ["rekindle_kernels.read_through"], f"imported too early: {early}"
    sys.modules["rekindle_kernels.system.windows"] = windows
    sys.platform = "win32"
