"""`__all__` says what is there, in every package that has one."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rekindle
import rekindle_kernels
from rekindle import errors

ROOT = Path(__file__).parents[2]

PACKAGES = [
    name
    for package in (rekindle, rekindle_kernels)
    for name in (
        package.__name__,
        *(info.name for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".") if info.ispkg),
    )
]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_names_exist_and_are_sorted(name: str) -> None:
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert exported == sorted(exported, key=str), f"{name}.__all__ is not sorted"
    missing = [entry for entry in exported if not hasattr(module, entry)]
    assert not missing, f"{name}.__all__ names {missing}, which are not there"


def test_every_lazy_name_is_exported() -> None:
    assert set(rekindle._LAZY) <= set(rekindle.__all__)


def test_dir_is_what_is_public() -> None:
    assert dir(rekindle) == sorted(rekindle.__all__)


def test_every_error_is_a_name_of_the_package() -> None:
    kinds = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and not name.startswith("_")}
    assert kinds <= set(rekindle.__all__)
    assert all(getattr(rekindle, name) is getattr(errors, name) for name in kinds)


def test_the_submodules_are_there_without_an_import() -> None:
    assert rekindle.models.ModelConfig.__name__ == "ModelConfig"
    assert (rekindle.tiny.folder() / "config.json").exists()
    assert dir(rekindle.models) == sorted(rekindle.models.__all__)


def test_tutorials_the_readme_and_pages_use_public_names() -> None:
    """All but the tutorials about the inside of the dispatch loop and of the simulator, which say that they don't."""
    pages = [*(ROOT / ".github/docs/pages").glob("*.md"), *(ROOT / "tutorials/guide").glob("*.md")]
    for path in [ROOT / "README.md", *sorted(pages), *sorted((ROOT / "tutorials/source").glob("[0-9]*.py"))]:
        if not path.name.startswith(("12_", "25_")):
            code = [line for line in path.read_text().splitlines() if "import" in line]
            assert not [line for line in code if "rekindle._src" in line], path.name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = rekindle.nonsense  # type: ignore[attr-defined]


def test_a_lazy_name_waits_for_the_thread_that_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.5)\nlate = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(rekindle._LAZY, "late", "slow_to_import")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(rekindle.__getattr__, "late")
        while "slow_to_import" not in sys.modules:
            time.sleep(0.01)
        assert rekindle.__getattr__("late") == first.result() == 1
    del sys.modules["slow_to_import"]
