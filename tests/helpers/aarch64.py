"""Native kernels for AArch64, compiled here and run by an emulator: what builds them, and what calls them.

A kernel that XLA calls in this process hands its operands to the same kernel in a process of qemu's, and gets its
results back. So every test of native kernels is also one of AArch64 code: see `on_guest.py`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from rekindle_kernels.native import cpu, library
from rekindle_kernels.native.chain_plan import slot
from rekindle_kernels.native.layout import BUFFER, CALL_FRAME, WORD
from rekindle_kernels.native.python_handlers import HANDLER, address_of, asks_version, buffer, read

COMPILER = "aarch64-linux-gnu-gcc"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
ROOT = Path("/usr/aarch64-linux-gnu")  # where Debian's cross compiler has the C library
# Emulated processors that have a level's features and, so that the use of any other ends the process, hardly more.
PROCESSORS = {"armv8": "cortex-a53", "armv8.2-dotprod": "neoverse-n1", "armv8.6-i8mm-bf16": "max"}
THREADS = 2
LOAD = 0  # other requests say with how many threads a kernel is called
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 16: 2, 33: 1}  # bytes, by dtype
_DTYPE = 2 * WORD  # in XLA's record of a buffer, which is an int32 there
_OPERAND_COUNT = 7 * WORD  # in XLA's call frame


def missing() -> str | None:
    """Why AArch64 code can't be run here; None if it can."""
    if sys.platform != "linux":
        return "qemu runs programs of other processors on Linux alone"
    if not any(map(shutil.which, EMULATORS)):
        return f"there is no {EMULATORS[0]}: apt-get install qemu-user-static"
    if shutil.which(COMPILER) is None or not ROOT.exists():
        return f"there is no {COMPILER}: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
    if find_spec("numba") is None:
        return "numba is not installed"
    return None


def build(folder: Path, level: str, kernels: Sequence[str]) -> str:
    """A library of these kernels for a level, and the program that calls them, into `folder`; what was said of it."""
    command = [sys.executable, "-m", "rekindle_kernels.native.build_library", "--levels", level, "--linker", COMPILER]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*command, "--out", str(folder), "--kernels", *kernels], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    build_guest(folder)
    return done.stderr


def build_guest(folder: Path) -> None:
    """The program that calls kernels, into `folder`."""
    source = Path(__file__).with_name("aarch64_guest.c")
    options = ["-O2", "-Wall", "-Werror", "-o", str(folder / "guest"), "-ldl", "-lpthread"]
    subprocess.run([COMPILER, str(source), *options], check=True)


def emulator(level: cpu.Level) -> list[str]:
    """Return the beginning of a command that runs on a processor of that level."""
    program = next(filter(None, map(shutil.which, EMULATORS)))
    return [program, "-cpu", PROCESSORS[level.name], "-L", str(ROOT)]


def run(level: cpu.Level, program: Path) -> int:
    """The exit status of a program."""
    return subprocess.run([*emulator(level), str(program)], capture_output=True, check=False).returncode


def guest(folder: Path, level: cpu.Level) -> list[str]:
    """The command that calls the kernels in `folder`."""
    (code,) = folder.glob("kernels-*.so")
    return [*emulator(level), str(folder / "guest"), str(code)]


class Guest:
    """The process that runs code of a level for another processor or system. Calls of several threads wait for each
    other."""

    def __init__(self, command: Sequence[str], level: cpu.Level, environment: Mapping[str, str] | None = None) -> None:
        self.level, self._lock, self._known = level, threading.Lock(), dict[str, Any]()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1 << 20, env=environment
        )
        self.calls: dict[str, int] = {}
        self.lacking: list[str] = []

    def close(self) -> None:
        """End the process; it must not have failed."""
        assert self._process.stdin is not None and self._process.stdout is not None, "pipes"
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait() == 0, f"the guest ended with {self._process.returncode}"

    def address(self, name: str) -> int:
        """The address of a handler that XLA can call in place of kernel `name`. Raises LookupError for an unknown
        one."""
        with self._lock:
            self._send([LOAD, slot(name)], library.symbol(name, self.level))
            if not self._words(1)[0]:
                self.lacking.append(name)
                raise LookupError(f"the library for {self.level.name} has no kernel {name}")
            self._known[name] = handler = HANDLER(self._handler(name))
        return address_of(handler)

    def _handler(self, name: str) -> Callable[[int], int]:
        def handle(frame: int) -> int:
            try:
                if not asks_version(frame):
                    with self._lock:
                        self._call(name, frame)
                        self.calls[name] = self.calls.get(name, 0) + 1
            except BaseException:
                traceback.print_exc()
                os._exit(70)  # XLA would take what is in memory for results
            return 0

        return handle

    def _call(self, name: str, frame: int) -> None:
        """Hand a call frame of XLA's over, and write what comes back to where it says."""
        counts = ctypes.c_int64.from_address(frame + _OPERAND_COUNT).value, read(CALL_FRAME, frame, "result_count")
        self._send([THREADS, slot(name), *counts])
        places: dict[int, int] = {}  # of operands, by address
        for side, count in zip(("operands", "results"), counts, strict=True):
            for index in range(count):
                record = buffer(frame, side, index)
                data, size = read(BUFFER, record, "data"), nbytes(record)
                from_operand = places.get(data, -1) if side == "results" and size else -1
                self._send([from_operand, read(BUFFER, record, "rank"), *dims(record), size])
                if side == "operands":
                    places[data] = index
                    self._write(ctypes.string_at(data, size))
        for index in range(counts[1]):
            record = buffer(frame, "results", index)
            ctypes.memmove(read(BUFFER, record, "data"), self._read(nbytes(record)), nbytes(record))

    def _send(self, words: Sequence[int], text: str | None = None) -> None:
        self._write(b"".join(int(word).to_bytes(8, "little", signed=True) for word in words))
        if text is not None:
            self._write(len(text).to_bytes(8, "little") + text.encode())

    def _words(self, count: int) -> list[int]:
        content = self._read(8 * count)
        return [int.from_bytes(content[at : at + 8], "little", signed=True) for at in range(0, len(content), 8)]

    def _write(self, content: bytes) -> None:
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(content)

    def _read(self, size: int) -> bytes:
        assert self._process.stdin is not None and self._process.stdout is not None, "pipes"
        self._process.stdin.flush()
        content = self._process.stdout.read(size)
        assert len(content) == size, f"the guest ended with {self._process.wait()}"
        return content


def dims(record: int) -> list[int]:
    """The sizes of a buffer's axes."""
    return list((ctypes.c_int64 * read(BUFFER, record, "rank")).from_address(read(BUFFER, record, "dims")))


def nbytes(record: int) -> int:
    """How many bytes a buffer has."""
    return _SIZES[ctypes.c_int32.from_address(record + _DTYPE).value] * prod(dims(record))
