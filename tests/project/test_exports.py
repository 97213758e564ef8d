"""`__all__` says what is there, in every package that has one."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
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


def test_tutorials_and_the_readme_use_public_names() -> None:
    """All but the tutorial about the inside of the dispatch loop, which says that it doesn't."""
    for path in [ROOT / "README.md", *sorted((ROOT / "tutorials").glob("*.py"))]:
        if not path.name.startswith("12_"):
            code = [line for line in path.read_text().splitlines() if "import" in line]
            assert not [line for line in code if "rekindle._src" in line], path.name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = rekindle.nonsense  # type: ignore[attr-defined]
