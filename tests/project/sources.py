"""Python files as trees."""

from __future__ import annotations

import ast

from rekindle._src.core.memory import gc_paused


def parsed(text: str, *, kept: bool = False) -> ast.Module:
    """Parse a file. The collector stays off: looking through the trees of all files takes twice as long as parsing
    them. Nor does it look through a tree that is `kept`."""
    with gc_paused(stays=kept):
        return ast.parse(text)
