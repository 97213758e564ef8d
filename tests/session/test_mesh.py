"""Sessions whose model is divided over devices: the same tokens as on one, wherever pages and weights come from.

Devices are simulated, in a process of their own: their number is fixed when JAX starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def checked(folder: Path, devices: int, *names: str, timeout: int = 580) -> None:
    """Run checks of `helpers/mesh_checks.py` in a process with so many devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "helpers" / "mesh_checks.py"), str(folder), *names],
        env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{name}: done" in done.stdout for name in names)


def test_a_mesh_gives_the_tokens_of_one_device(tmp_path: Path) -> None:
    checked(tmp_path, 4, "some_families", "snapshots", "memory_is_given_back")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "every_family", "repeated_kv_heads", "kernels_of_xla", "quantised", "int8_pages", "restarts",
        "tiers_and_preemption", "loaded_weights",
    ],
)  # fmt: skip
def test_on_eight_devices(tmp_path: Path, name: str) -> None:
    checked(tmp_path, 8, name)
