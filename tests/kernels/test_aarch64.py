"""Native kernels as AArch64 code: tests of this folder, whose kernels qemu runs on processors with nothing more.

Kernels are compiled and linked as for a wheel. What each is compared with, and how close it must come, its own tests
say: integers to the last bit, floats as near as on x86. Emulated memory is as strictly ordered as this machine's, so
what threads owe each other on a real processor of this kind is not shown.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers import aarch64, on_aarch64
from rekindle_kernels.native import build_library, cpu
from rekindle_kernels.native.kernel_table import GATE

REASON = aarch64.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
HERE = Path(__file__).parent
AT_ONCE = 2  # processes with tests
LEVELS = [level for level in cpu.LEVELS if level.machine == "aarch64"]
# Those of one head size, and those of the others that tests have.
# The gate is left out: it waits for this process, whose memory an emulated one does not share.
ALL = [name for name in build_library.all_kernels([64]) if name != GATE.variant().name]
ALL += [name for name in build_library.all_kernels([16, 80, 128]) if "_float32_" in name]
ALL += ["prefill_float32_32"]
_ABSENT = ["pallas", "xla", "object_code", "cannot_be_written", "not_installed", "head_dim_256", "heads_of_512"]
NOT_OF_LIBRARIES = " and ".join(f"not {name}" for name in _ABSENT)
ALL_TESTS = ["native", "int4", "ops", "deterministic", "chain", "masked_draws", "adapters", "recurrence"]
ALL_CASES = ["paged_attention"]  # whose slow ones need kernels that no others do
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
    *,
    with_slow: Sequence[str] = (),
) -> None:
    """Compile the kernels for the level, run tests of this folder with them, and see that each kernel was called."""
    kernels = [name for name in kernels if build_library.fits(name, level)]
    assert "can't be compiled" not in aarch64.build(folder, level.name, kernels)
    paths = os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, on_aarch64.FOLDER: str(folder), on_aarch64.LEVEL: level.name}
    environment.pop("REKINDLE_CACHE", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "helpers.on_aarch64"]

    def run(names: Sequence[str], marks: str = "not slow") -> subprocess.CompletedProcess[str]:
        whole = [*command, *(f"test_{name}.py" for name in names), "-k", chosen, "-m", marks]
        return subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=1100, cwd=HERE)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(run, tests[first::AT_ONCE]) for first in range(AT_ONCE)]
        running += [pool.submit(run, [name], "slow or not slow") for name in with_slow]
        outcomes = [future.result() for future in running]
    called = set[str]()
    for done in outcomes:
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert " passed" in done.stdout
        told = next(line for line in done.stdout.splitlines() if line.startswith(on_aarch64.CALLED))
        called |= {word.split()[0] for word in told.removeprefix(on_aarch64.CALLED).split(",") if word.strip()}
    assert {*kernels} <= called, f"never called: {', '.join({*kernels} - called)}"


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
