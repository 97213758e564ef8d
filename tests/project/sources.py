"""The Python files of both packages and their workshops, and files as trees."""

from __future__ import annotations

import ast
from pathlib import Path

from rekindle._src.core.memory import gc_paused

ROOT = Path(__file__).parents[2]


def package_files(*packages: str) -> list[Path]:
    """List the files of packages, by default of both and of their workshops, without the scripts that measure."""
    folders = [ROOT / package for package in packages or ("toolkit", "kernels")]
    scripts = ROOT / "toolkit/workshop/bench"
    return sorted(path for folder in folders for path in folder.rglob("*.py") if scripts not in path.parents)


def parsed(text: str, *, kept: bool = False) -> ast.Module:
    """Parse a file. The collector stays off: looking through the trees of all files takes twice as long as parsing
    them. Nor does it look through a tree that is `kept`."""
    with gc_paused(stays=kept):
        return ast.parse(text)
