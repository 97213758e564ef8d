"""Starting again from the cache prints what was asked for, and no alarming lines of XLA or JAX."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def generate(cache: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / name) for name in ("toolkit", "kernels"))
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "REKINDLE_CACHE": str(cache)}
    command = [sys.executable, "-m", "rekindle", "generate", "Once ", "--max-tokens", "4"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)


@pytest.mark.slow
def test_a_warm_start_says_nothing_of_its_own(tmp_path: Path) -> None:
    generate(tmp_path / "cache")
    again = generate(tmp_path / "cache")
    assert again.stdout.strip()
    # The one line that `generate` itself writes there: tokens and times.
    assert re.fullmatch(r"\[2 prompt \+ 4 new tokens, .*\]\s*", again.stderr), again.stderr
