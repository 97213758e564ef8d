"""`__all__` says what is there, in every package that has one."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import rekindle
import rekindle_kernels

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


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = rekindle.nonsense  # type: ignore[attr-defined]
