"""Native kernels as AArch64 code: tests of this folder, whose kernels qemu runs on processors with nothing more.

Kernels are compiled and linked as for a wheel. What each is compared with, and how close it must come, its own tests
say: integers to the last bit, floats as near as on x86. Emulated memory is as strictly ordered as this machine's, so
what threads owe each other on a real processor of this kind is not shown.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers import aarch64, guest_tests
from helpers.guest_tests import ALL, ALL_CASES, ALL_TESTS, NOT_OF_LIBRARIES
from rekindle_kernels.native import build_library, cpu

REASON = aarch64.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
LEVELS = [level for level in cpu.LEVELS if level.machine == "aarch64"]
# Kernels of newer levels that are others than the level below has.
NEWER = {
    "armv8.2-dotprod": [
        "gemm_int8",
        *(name for name in ALL if name.startswith(("int4", "int6groups_", "int8groups_", "codebook"))),
    ],
    "armv8.6-i8mm-bf16": ["gemm_int8", "gemm_bfloat16"],
}
BESIDE = ["norm", "matvec_bfloat16", "matvec_float16", "matvec_float32", "matvec_int8"]  # tests need them
NEWER_TESTS = "many_rows or normed or only_the_first or exactly or number_of_rows"


def passes(
    level: cpu.Level,
    kernels: Sequence[str],
    tests: Sequence[str],
    chosen: str,
    folder: Path,
    with_slow: Sequence[str] = (),
) -> None:
    """Compile the kernels for the level, run tests of this folder with them, and see that each kernel was called."""
    kernels = [name for name in kernels if build_library.fits(name, level)]
    assert "is left out" not in aarch64.build(folder, level.name, kernels)
    guest_tests.run(level, kernels, tests, chosen, folder, with_slow=with_slow)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_kernels_are_exact_on_the_oldest(tmp_path: Path) -> None:
    passes(LEVELS[-1], ALL, ALL_TESTS, NOT_OF_LIBRARIES, tmp_path, with_slow=ALL_CASES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", LEVELS[:-1], ids=lambda level: level.name)
def test_products_are_exact_on_newer_ones(level: cpu.Level, tmp_path: Path) -> None:
    tests = ["native", "int4", "deterministic"] if "int4_float16" in NEWER[level.name] else ["native", "deterministic"]
    passes(level, [*NEWER[level.name], *BESIDE], tests, NEWER_TESTS, tmp_path)


def test_what_a_level_lacks_ends_the_guest(tmp_path: Path) -> None:
    """Emulated processors refuse what is beyond their level, so that a kernel which needs more can't pass."""
    source = tmp_path / "beyond.c"
    source.write_text('int main(void) { __asm__ volatile(".arch armv8.2-a+dotprod\\nsdot v0.4s, v1.16b, v2.16b"); }')
    program = tmp_path / "beyond"
    subprocess.run([aarch64.COMPILER, str(source), "-o", str(program)], check=True)
    ended = {level.name: aarch64.run(level, program) for level in LEVELS}
    assert [status == 0 for status in ended.values()] == ["dotprod" in level.features for level in LEVELS]
