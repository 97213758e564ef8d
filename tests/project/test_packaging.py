"""What pip builds: an editable install that editors can follow, and a wheel with everything that is not Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import util
from pathlib import Path

import pytest

import rekindle

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(util.find_spec("hatchling") is None, reason="hatchling is not installed")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks, since a build writes next to its sources."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    copy = tmp_path_factory.mktemp("checkout")
    for name in names.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    return copy


def built(checkout: Path, hook: str, target: Path) -> zipfile.ZipFile:
    """The wheel that a hook of PEP 517 or PEP 660 builds."""
    code = f"import hatchling.build; print(hatchling.build.{hook}({str(target)!r}))"
    environment = {**os.environ, "REKINDLE_BUILD_KERNELS": "0"}  # test_platform_wheel.py is about them
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return zipfile.ZipFile(target / done.stdout.split()[-1])


@pytest.mark.slow
def test_the_wheel_has_what_the_packages_have(checkout: Path, tmp_path: Path) -> None:
    with built(checkout, "build_wheel", tmp_path) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/METADATA"))
    sources = {
        path.relative_to(folder).as_posix()
        for folder in (checkout / "toolkit", checkout / "kernels")
        for path in folder.glob("rekindle*/**/*")
        if path.is_file()
    }
    course = {name for name in packed if name.startswith("rekindle/course/")}
    assert packed - course == sources
    pages = {f"rekindle/course/{path.name}" for path in (checkout / "tutorials/course").glob("*.ipynb")}
    assert len(pages) >= 26 and {name for name in course if name.endswith(".ipynb")} == pages
    assert {name for name in course if name.endswith(".py")} == {"rekindle/course/engine.py"}
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert not [name for name in pages if '"output_type"' in wheel.read(name).decode()]
        assert sum(wheel.getinfo(name).compress_size for name in course) < 400_000
    assert {name.partition("/")[0] for name in packed} == {"rekindle", "rekindle_kernels"}  # and no workshop
    assert not [name for name in packed if name.endswith((".cpp", ".c", ".h"))]
    assert {"rekindle/py.typed", "rekindle_kernels/py.typed", "rekindle/_src/notebook/static/panel.js"} <= packed
    assert "rekindle/tiny/model/config.json" in packed
    assert f"\nVersion: {rekindle.__version__}\n" in metadata


def test_the_editable_install_is_a_plain_path_file(checkout: Path, tmp_path: Path) -> None:
    """Type checkers don't run import hooks: they read folders out of .pth files."""
    with built(checkout, "build_editable", tmp_path) as wheel:
        (path,) = [name for name in wheel.namelist() if name.endswith(".pth")]
        folders = wheel.read(path).decode().split("\n")
    assert {Path(folder) for folder in folders if folder} == {checkout / "toolkit", checkout / "kernels"}
