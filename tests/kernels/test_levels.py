"""Native kernels at every level of processors that this one includes: tests of this folder, with features masked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle_kernels.native import build, cpu

pytestmark = pytest.mark.skipif(build.unavailable_reason() is not None, reason="no native kernels here")
HERE = Path(__file__).parent
LOWER = cpu.levels()[1:]  # the best one is what the other tests run with
WHOLE = ["test_native.py", "test_paged_attention.py", "test_ops.py", "test_deterministic.py", "test_chain.py"]
WHOLE += ["test_int4.py", "test_masked_draws.py", "test_recurrence.py"]


def passes(level: cpu.Level, tests: list[str]) -> None:
    environment = {**os.environ, cpu.MASK: level.name}
    environment.pop("REKINDLE_CACHE", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, cwd=HERE)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("level", LOWER, ids=lambda level: level.name)
def test_all_kernels_are_exact_at_every_level(level: cpu.Level) -> None:
    passes(level, [*WHOLE, "-k", "not pallas"])
