"""The kernel tests on other versions of ipykernel, each in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def environment(folder: Path, version: str) -> Path:
    """A venv with this ipykernel in front of everything that is installed here; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    done = subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", f"ipykernel=={version}"], check=False)
    if done.returncode:
        pytest.skip(f"ipykernel {version} can't be installed here")
    # After the venv's own packages, so that only ipykernel differs.
    (Path(packages) / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", ["6.29.5", "7.2.0", "7.4.0"])
def test_sessions_in_kernels_of_other_versions(version: str, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", version)
    found = subprocess.run(
        [python, "-c", "import ipykernel; print(ipykernel.__version__)"], check=True, capture_output=True, text=True
    )
    assert found.stdout.strip() == version
    # Into a file: a kernel that outlives its manager would keep a pipe open, and with it this test.
    with (tmp_path / "output").open("w+") as output:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", ROOT / "tests/session/test_kernels.py"],
            env={**os.environ, "REKINDLE_KERNEL_PYTHON": str(python)},
            cwd=ROOT,
            check=False,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=1000,
        )
        output.seek(0)
        assert done.returncode == 0, output.read()[-6000:]
