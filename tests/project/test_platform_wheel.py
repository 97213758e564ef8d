"""The wheel's name says what it carries: prebuilt kernels make it one for a platform."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle_kernels import unavailable_reason

pytest.importorskip("hatchling", reason="hatchling builds the wheel")
ROOT = Path(__file__).parents[2]


def hook() -> Any:
    spec = importlib.util.spec_from_file_location("platform_wheel", ROOT / ".ci" / "platform_wheel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def initialised(root: Path, version: str = "standard") -> dict[str, Any]:
    data: dict[str, Any] = {"force_include": {}}
    hook().PlatformWheel(str(root), {}, None, None, "", "wheel").initialize(version, data)
    return data


def source_tree(folder: Path) -> Path:
    """The sources of the kernels alone, which is all that compiling them needs."""
    ignore = shutil.ignore_patterns("prebuilt", "__pycache__")
    shutil.copytree(ROOT / "kernels", folder / "kernels", ignore=ignore)
    return folder


def test_without_kernels_it_is_pure_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_BUILD_KERNELS", "0")
    assert initialised(tmp_path) == {"force_include": {}}


def test_a_wheel_says_which_commit_it_was_built_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    monkeypatch.setenv("REKINDLE_BUILD_KERNELS", "0")
    for arguments in (["init", "-q"], ["commit", "-qm", "one", "--allow-empty"]):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)
    head = (tmp_path / ".git" / "HEAD").read_text().removeprefix("ref: ").strip()
    ((file, name),) = initialised(tmp_path)["force_include"].items()
    assert name == "rekindle/commit.txt"
    assert (tmp_path / ".git" / head).read_text().startswith(Path(file).read_text().strip())
    assert initialised(tmp_path, "editable") == {"force_include": {}}, "a clone says it itself"


def test_where_they_cannot_be_compiled_one_line_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('numba has no wheel for this Python')")
    monkeypatch.syspath_prepend(tmp_path)
    assert initialised(source_tree(tmp_path / "clone")) == {"force_include": {}}
    last = capfd.readouterr().err.splitlines()[-1]
    assert "can't be compiled here (numba has no wheel for this Python)" in last and "XLA does their work" in last


@pytest.mark.skipif(sys.platform != "linux", reason="its tag is Linux's")
@pytest.mark.skipif(unavailable_reason("cpu") is not None, reason="no native kernels here")
@pytest.mark.slow  # CI installs it
def test_an_installation_compiles_them_once_and_the_wheel_is_for_this_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without JAX, which the environment of a build does not have."""
    monkeypatch.setenv("REKINDLE_KERNEL_NAMES", "norm argmax")
    (tmp_path / "jax.py").write_text("raise ImportError('a build has no JAX')")
    root = source_tree(tmp_path / "clone")
    # As pip does where this clone is installed already: the environment's own paths are taken away.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.path.remove({str(root / 'kernels')!r})")
    monkeypatch.syspath_prepend(tmp_path)
    assert initialised(root, "editable") == {"force_include": {}}, "they lie in the clone"
    assert "2 kernels" in capfd.readouterr().err
    folder = root / hook().PREBUILT
    manifest = json.loads((folder / "manifest.json").read_text())
    assert list(manifest["levels"].values()) == [["norm", "argmax"]]
    first = (folder / "manifest.json").stat().st_mtime_ns
    data = initialised(root)
    assert (folder / "manifest.json").stat().st_mtime_ns == first, "the sources are the same"
    assert data["tag"] == f"py3-none-manylinux_2_28_{platform.machine()}" and data["pure_python"] is False
    inside = "rekindle_kernels/native/prebuilt/"
    assert sorted(data["force_include"].values()) == [f"{inside}{manifest['library']}", f"{inside}manifest.json"]
    with (root / "kernels/rekindle_kernels/native/cpu.py").open("a") as source:
        source.write("# changed\n")
    initialised(root, "editable")
    assert (folder / "manifest.json").stat().st_mtime_ns > first, "a developer gets no kernels of older sources"
