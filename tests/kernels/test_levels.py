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
WHOLE += ["test_added_keys.py", "test_int4.py", "test_masked_draws.py", "test_recurrence.py"]
CHOSEN = "(many_rows or normed or only_the_first or exactly or number_of_rows or bfloat16) and not pallas"
DIFFERENT = ["test_native.py", "test_int4.py", "test_deterministic.py", "test_paged_attention.py", "test_added_keys.py"]
DIFFERENT += ["-k", CHOSEN]


def passes(level: cpu.Level, tests: list[str]) -> None:
    environment = {**os.environ, cpu.MASK: level.name}
    environment.pop("REKINDLE_CACHE", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, cwd=HERE)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not LOWER, reason="this processor has one level")
def test_all_kernels_are_exact_at_the_lowest_level() -> None:
    passes(LOWER[-1], [*WHOLE, "-k", "not pallas"])


@pytest.mark.slow
@pytest.mark.parametrize("level", LOWER[:-1], ids=lambda level: level.name)
def test_kernels_that_differ_are_exact_at_levels_between(level: cpu.Level) -> None:
    """Instructions for products, and for pages of bfloat16, come and go there; vectors are those of the best level."""
    passes(level, DIFFERENT)
