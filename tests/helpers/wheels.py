"""Wheels with native kernels of another platform, built as a release builds them."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LARGEST = 15 << 20  # bytes of a wheel
KERNELS = "rekindle_kernels/native/prebuilt/"


def contents(library: Path, folder: Path, tag: str) -> dict[str, bytes]:
    """Build the wheel of the kernels in `library`, check its tag and size, and return its files of kernels by name."""
    if find_spec("hatchling") is None:
        pytest.skip("hatchling builds the wheel")
    environment = {**os.environ, "REKINDLE_WHEEL_LIBRARY": str(library)}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-{tag}.whl") and wheel.stat().st_size < LARGEST
    with zipfile.ZipFile(wheel) as packed:
        return {name.removeprefix(KERNELS): packed.read(name) for name in packed.namelist() if name.startswith(KERNELS)}
