"""Names and docstrings in plain words: participles are refused where the field has nouns.

Write `match`, `fields`, `request`, `reason` or `message` for what was found, given, asked, told or said. A docstring
begins with a verb, or with "True if".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = frozenset(("found", "given", "asked", "told", "said"))
BEGINNINGS = frozenset(("What", "Whether", "Who"))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module

# Older ones, by their functions, and by the first five words of docstrings. These lists may only shrink.
LEFT = """
    __init__(asked) _assembled(found) _bits(found) _check_own(found) _download(asked) _download_gguf(asked)
    _each(found) _reads(found) _shapes_of(found) _source(said)
    address(found) check_fits(found) compare(found) features_of_macos(told)
    fill(found) fitted(found) found listed(found) place(asked) plan(found)
    said slot(asked) with_matrices(found)
"""
LEFT_BEGINNINGS = """
What a chain does, as
What decode and prefill attention
What kernels are written in:
What this processor can do,
"""


@cache
def definitions() -> tuple[tuple[str, Definition], ...]:
    """All modules, classes and functions of the packages, with their names."""
    paths = sorted(path for package in ("toolkit", "kernels") for path in (ROOT / package).rglob("*.py"))
    modules = [
        (path.parent.name if path.stem == "__init__" else path.stem, ast.parse(path.read_text())) for path in paths
    ]
    return (*modules, *((node.name, node) for _, module in modules for node in inside(module)))


def inside(block: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The definitions in a block of statements, and in the blocks inside of it."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        for node in getattr(block, name, ()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node
            yield from inside(node)


def parameters(node: Definition) -> list[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    arguments = node.args
    several = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [argument.arg for argument in several if argument is not None]


def test_functions_and_parameters_have_nouns_for_names() -> None:
    names = {name for name, node in definitions() if name in NAMES and not isinstance(node, ast.Module)}
    names |= {f"{name}({arg})" for name, node in definitions() for arg in parameters(node) if arg in NAMES}
    assert not names - set(LEFT.split()), "use a noun: match, fields, request, reason, message"
    assert not set(LEFT.split()) - names, "renamed: take it off the list"


def test_docstrings_begin_with_a_verb() -> None:
    words = [(ast.get_docstring(node, clean=False) or "").split()[:5] for _, node in definitions()]
    beginnings = {" ".join(first) for first in words if first and first[0].strip(",:") in BEGINNINGS}
    left = set(LEFT_BEGINNINGS.strip().splitlines())
    assert not beginnings - left, 'begin with a verb, or with "True if"'
    assert not left - beginnings, "rewritten: take it off the list"
