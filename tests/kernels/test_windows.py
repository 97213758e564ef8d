"""Native kernels for Windows: a DLL linked here, read as its loader would, and called in a process of Wine's.

Windows itself has not run them. The tests of kernels compare results as on Linux, with the same machine instructions
under another calling convention; a process of Wine's checks what a call leaves in its caller's registers.
"""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
from pathlib import Path

import pytest

from helpers import guest_tests, portable_executable, wheels, windows
from rekindle_kernels.native import build_library, cpu, cpuid, library
from rekindle_kernels.native.chain_plan import CHAIN, ENTRIES

UNLINKED, MISSING = windows.unlinked(), windows.missing()
pytestmark = [
    pytest.mark.skipif(UNLINKED is not None, reason=str(UNLINKED)),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
ROOT = Path(__file__).parents[2]
OLDEST = cpu.level_called("x86-64-v3")
KERNELS = [CHAIN, "norm", "argmax", "gemm_int8"]
# All that is taken from elsewhere is in two libraries that every Windows has.
OUTSIDE = {
    "kernel32.dll": {"GetCurrentThreadId", "Sleep", "SwitchToThread"},
    "msvcrt.dll": {"free", "malloc", "memcpy", "memmove", "memset"},
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    assert "is left out" not in windows.build(folder, OLDEST.name, KERNELS)
    return folder


def test_windows_would_load_the_dll(built: Path) -> None:
    manifest = json.loads((built / library.MANIFEST).read_text())
    found = portable_executable.read(built / manifest["library"])
    assert (manifest["platform"], manifest["library"]) == ("win32-x86_64", windows.DLL)
    assert found.machine == portable_executable.X86_64 and found.is_library and found.may_move
    assert found.name == windows.DLL
    written_and_executed = portable_executable.WRITE | portable_executable.EXECUTE
    assert not [name for name, may in found.sections.items() if may & written_and_executed == written_and_executed]
    assert found.exports == {ENTRIES, *(library.symbol(name, OLDEST) for name in manifest["levels"][OLDEST.name])}
    assert found.imports.keys() <= OUTSIDE.keys()
    assert all(names <= OUTSIDE[name] for name, names in found.imports.items())


def test_a_wheel_for_windows_is_made_here(built: Path, tmp_path: Path) -> None:
    packed = wheels.contents(built, tmp_path, "win_amd64")
    assert packed.keys() == {library.MANIFEST, windows.DLL}
    assert packed[windows.DLL] == (built / windows.DLL).read_bytes()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_the_processor_describes_itself_there_as_here(tmp_path: Path) -> None:
    """The code of CPUID and XGETBV follows Windows's calling convention, as `cpuid.own` calls it there."""
    windows.build_program(tmp_path, "windows_code.c", "code.exe")
    with contextlib.ExitStack() as open_processes:

        def begun(code: bytes) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                windows.guest(tmp_path, "code.exe"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env=windows.environment(tmp_path), bufsize=0,
            )  # fmt: skip
            assert process.stdin is not None
            process.stdin.write(struct.pack("<Q", len(code)) + code)
            return open_processes.enter_context(process)

        def call(process: subprocess.Popen[bytes], *words: int) -> tuple[int, ...]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(struct.pack("<4I", *words, 0, 0))
            return struct.unpack("<4I", process.stdout.read(16))

        leaves, saved = begun(cpuid.CPUID), begun(cpuid.XGETBV)
        there = cpuid.Processor(
            lambda leaf, below: cpuid.Registers(*call(leaves, leaf, below)), lambda: call(saved, 0, 0)[0]
        )
        assert cpuid.vendor(there) == cpuid.vendor(cpuid.own())
        assert cpuid.features(there) == cpuid.features(cpuid.own())
        assert cpu.features_of_x86(there) == cpu.features_of_x86(cpuid.own())


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.skipif(OLDEST not in cpu.levels(), reason="this processor has no AVX2")
def test_all_kernels_are_exact(tmp_path: Path) -> None:
    kernels = [name for name in guest_tests.ALL if build_library.fits(name, OLDEST)]
    assert "is left out" not in windows.build(tmp_path, OLDEST.name, kernels)
    windows.build_guest(tmp_path)
    guest_tests.run(
        OLDEST, kernels, guest_tests.ALL_TESTS, guest_tests.NOT_OF_LIBRARIES, tmp_path, with_slow=guest_tests.ALL_CASES
    )
