"""Native kernels for Windows, linked here as a DLL and called in a process of Wine's; `on_guest.py` makes tests do so.

Wine gives the machine code to this processor as it is: what differs from Linux's is the calling convention, who grows
the stack, and where memory and threads come from.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

WINE = ("wine64", "wine", "/usr/lib/wine/wine64")
LINKER = (sys.executable, "-m", "ziglang", "lld-link")
DLL, PROGRAM = "kernels-win32-x86_64.dll", "guest.exe"
_IMPORTS = {
    "kernel32": (
        "CloseHandle", "CreateThread", "ExitProcess", "GetProcAddress", "GetStdHandle", "LoadLibraryA", "ReadFile",
        "SwitchToThread", "VirtualAlloc", "VirtualFree", "VirtualProtect", "WriteFile", "lstrlenA",
    ),
    "msvcrt": ("free", "malloc", "memset"),
}  # fmt: skip


def unlinked() -> str | None:
    """Why no DLL can be made here; None if one can."""
    if find_spec("ziglang") is None:
        return "the linker is not installed: pip install ziglang"
    return "numba is not installed" if find_spec("numba") is None else None


def missing() -> str | None:
    """Why code for Windows can't be run here; None if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "Wine gives code for x86-64 to the processor as it is"
    if not any(map(shutil.which, WINE)):
        return "there is no Wine: apt-get install wine64"
    return unlinked()


def build(folder: Path, level: str, kernels: Sequence[str]) -> str:
    """A DLL of these kernels for a level, and the program that calls them, into `folder`; what was said of it."""
    command = [sys.executable, "-m", "rekindle_kernels.native.build_library", "--system", "win32", "--levels", level]
    command += ["--linker", " ".join(LINKER), "--out", str(folder), "--kernels", *kernels]
    environment = {**os.environ, **_caches(folder), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def build_guest(folder: Path) -> None:
    """The program that calls kernels, without a C library, into `folder`."""
    build_program(folder, "windows_guest.c", PROGRAM)


def build_program(folder: Path, name: str, program: str) -> None:
    """A program of this folder's C, without a C library, into `folder`, where Wine gets its prefix."""
    source, code = Path(__file__).with_name(name), (folder / program).with_suffix(".o")
    options = ["-O2", "-Wall", "-Werror", "-fno-stack-protector", "-fno-sanitize=all", "-mno-stack-arg-probe"]
    compiler = [sys.executable, "-m", "ziglang", "cc", "-c", "-target", "x86_64-windows-gnu", *options]
    caches = {**os.environ, **_caches(folder)}
    subprocess.run([*compiler, str(source), "-o", str(code)], env=caches, check=True)
    stubs = []
    for name, functions in _IMPORTS.items():
        listed, stub = folder / f"guest-{name}.def", folder / f"guest-{name}.lib"
        listed.write_text("\n".join([f"LIBRARY {name}.dll", "EXPORTS", *functions, ""]))
        subprocess.run([*LINKER, "/lib", f"/def:{listed}", "/machine:x64", f"/out:{stub}"], check=True)
        stubs.append(str(stub))
    place = ["/entry:start", "/subsystem:console", "/nodefaultlib", "/machine:x64", f"/out:{folder / program}"]
    subprocess.run([*LINKER, *place, str(code), *stubs], check=True)
    # Its first start makes the prefix, and of several at once some would find half of one.
    subprocess.run([_wine(), "cmd", "/c", "exit"], env=environment(folder), check=True)


def _caches(folder: Path) -> dict[str, str]:
    return {"ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"), "ZIG_LOCAL_CACHE_DIR": str(folder / "zig")}


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of Wine: a prefix in `folder`, which its first start creates, and no display."""
    return {
        **os.environ,
        "WINEPREFIX": str(folder / "wine"),
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "mscoree,mshtml=",
    }


def guest(folder: Path, program: str = PROGRAM) -> list[str]:
    """The command that runs a program in `folder`, by default the one that calls the kernels there."""
    return [_wine(), str(folder / program)]


def _wine() -> str:
    return next(filter(None, map(shutil.which, WINE)))
