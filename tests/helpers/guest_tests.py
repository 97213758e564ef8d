"""The tests of native kernels, run with kernels that a guest calls: `on_guest.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers import on_guest
from rekindle_kernels.native import build_library, cpu, library
from rekindle_kernels.native.kernel_table import GATE

AT_ONCE = 2  # processes with tests
TESTS = Path(__file__).parents[1]
# Those of one head size, and those of the others that tests have.
# The gate is left out: it waits for this process, whose memory a guest does not share.
ALL = [name for name in build_library.all_kernels([64]) if name != GATE.variant().name]
ALL += [name for name in build_library.all_kernels([16, 80, 128]) if "_float32_" in name]
ALL += ["prefill_float32_32"]
_ABSENT = ["pallas", "xla", "object_code", "cannot_be_written", "not_installed", "head_dim_256", "heads_of_512"]
NOT_OF_LIBRARIES = " and ".join(f"not {name}" for name in _ABSENT)
ALL_TESTS = ["native", "int4", "ops", "deterministic", "chain", "masked_draws", "adapters", "recurrence", "added_keys"]
ALL_CASES = ["paged_attention"]  # whose slow ones need kernels that no others do


def run(
    level: cpu.Level,
    kernels: Sequence[str],
    tests: Sequence[str],
    chosen: str,
    folder: Path,
    *,
    with_slow: Sequence[str] = (),
) -> None:
    """Run tests of kernels with those in `folder`, and see that each kernel was called."""
    paths = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, on_guest.FOLDER: str(folder), on_guest.LEVEL: level.name}
    environment[library.FOLDER] = str(folder / "none")  # an installation's kernels, which this processor has
    environment.pop("REKINDLE_CACHE", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "helpers.on_guest"]

    def passed(names: Sequence[str], marks: str = "not slow") -> subprocess.CompletedProcess[str]:
        whole = [*command, *(f"test_{name}.py" for name in names), "-k", chosen, "-m", marks]
        return subprocess.run(
            whole, env=environment, capture_output=True, text=True, timeout=1100, cwd=TESTS / "kernels", check=False
        )

    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(passed, names) for first in range(AT_ONCE) if (names := tests[first::AT_ONCE])]
        running += [pool.submit(passed, [name], "slow or not slow") for name in with_slow]
        outcomes = [future.result() for future in running]
    called = set[str]()
    for done in outcomes:
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert " passed" in done.stdout
        told = next(line for line in done.stdout.splitlines() if line.startswith(on_guest.CALLED))
        called |= {word.split()[0] for word in told.removeprefix(on_guest.CALLED).split(",") if word.strip()}
    assert {*kernels} <= called, f"never called: {', '.join({*kernels} - called)}"
