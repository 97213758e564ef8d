"""Folders of the private package meet in functions and classes whose signatures say what passes between them."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from project.sources import parsed

SOURCE = Path(__file__).parents[2] / "toolkit/rekindle/_src"
MOST = 13
"""`Any`s in signatures that another folder imports. The number may only fall: lower it with each that gets a type.

Those that stay are values that only a caller can know (what a JSON text holds, what a compiled program takes and
returns, what a server hands on to its app), and what `pyright --verifytypes` does not know:
`jax.Device`, and private types.
"""

OF_ANY_DTYPE = {"NDArray", "ndarray", "dtype"}
CALLED = {"__init__", "__call__"}


def test_signatures_between_folders_have_types() -> None:
    found = dict(untyped())
    assert sum(found.values()) <= MOST, f"say what passes: {found}"


def untyped() -> Iterator[tuple[str, int]]:
    """Yield each function, method and field that another folder can see, with the `Any`s in its annotations."""
    trees = {path: parsed(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    shared = imported(trees)
    for path, tree in trees.items():
        counts: Counter[str] = Counter()
        for node in tree.body:
            name = getattr(node, "name", None)
            if name not in shared[path]:
                continue
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                counts[name] += of_signature(node)
            elif isinstance(node, ast.ClassDef):
                overloaded = {overload_of(member) for member in node.body}
                for member in node.body:
                    if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                        if member.name in overloaded and not overload_of(member):
                            continue  # its callers see the overloads
                        if not member.name.startswith("_") or member.name in CALLED:
                            counts[f"{name}.{member.name}"] += of_signature(member)
                    elif isinstance(member, ast.AnnAssign) and not (field := ast.unparse(member.target)).startswith(
                        "_"
                    ):
                        counts[f"{name}.{field}"] += anys(member.annotation)
        yield from ((f"{path.relative_to(SOURCE)}: {name}", count) for name, count in counts.items() if count)


def imported(trees: dict[Path, ast.Module]) -> defaultdict[Path, set[str]]:
    """Return the names that other folders take from each file."""
    paths = {".".join(("rekindle", "_src", *path.relative_to(SOURCE).with_suffix("").parts)): path for path in trees}
    paths |= {name.removesuffix(".__init__"): path for name, path in paths.items()}
    names = defaultdict[Path, set[str]](set)
    for user, tree in trees.items():
        modules: dict[str, Path] = {}
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Attribute)]
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    module = paths.get(f"{node.module}.{alias.name}")
                    if module is not None:
                        modules[alias.asname or alias.name] = module
                    elif (owner := paths.get(node.module)) is not None and folder(owner) != folder(user):
                        names[owner].add(alias.name)
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = modules.get(node.value.id)
                if owner is not None and folder(owner) != folder(user):
                    names[owner].add(node.attr)
    return names


def overload_of(node: ast.stmt) -> str | None:
    """Return the name of the method that a signature is one of several of."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    return node.name if any(ast.unparse(each) == "overload" for each in node.decorator_list) else None


def folder(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


def of_signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return anys(node.returns) + sum(anys(each.annotation) for each in every if each is not None)


def anys(node: ast.AST | None) -> int:
    """Count `Any` in an annotation; arrays of any dtype are meant so."""
    if node is None:
        return 0
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] in OF_ANY_DTYPE:
        return 0
    return (isinstance(node, ast.Name) and node.id == "Any") + sum(anys(child) for child in ast.iter_child_nodes(node))
