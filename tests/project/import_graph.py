"""The imports of both packages as a graph of folders: `python tests/project/import_graph.py` prints it.

An edge is any import, at the top of a file or inside a function, and any string that names a module, since
`importlib.import_module("rekindle...")` imports as well. Imports for type checking only are listed apart.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from project.sources import parsed

ROOT = Path(__file__).parents[2]
PACKAGES = {"rekindle": ROOT / "toolkit" / "rekindle", "rekindle_kernels": ROOT / "kernels" / "rekindle_kernels"}
# From the bottom up. A folder imports only from those that stand before it.
FOLDERS = (
    "rekindle_kernels",
    "rekindle.errors",
    "rekindle._src.core",
    "rekindle._src.channels",
    "rekindle._src.images",
    "rekindle._src.models",
    "rekindle._src.text",
    "rekindle._src.structured",
    "rekindle._src.kvcache",
    "rekindle._src.programs",
    "rekindle._src.scheduling",
    "rekindle._src.data_shards",
    "rekindle._src.execution",
    "rekindle._src.drafts",
    "rekindle._src.processes",
    "rekindle._src.dispatch",
    "rekindle._src.capabilities",
    "rekindle._src.views",
    "rekindle._src.notebook",
    "rekindle._src.serve",
    "rekindle.tiny",
    "rekindle._src.opening",
    "rekindle._src.calls",
    "rekindle._src.evaluation",
    "rekindle._src.session",
    "rekindle._src.integrations",
    "rekindle._src.replicas",
    "rekindle._src.shelf",
    "rekindle._src.bench",
    "rekindle._src.cli",
    "rekindle",
)
_NAME = re.compile(r"rekindle(?:_kernels)?(?:\.\w+)+")


class Edge(NamedTuple):
    """One import: who, where, whom, and whether only a type checker follows it."""

    source: str
    path: Path
    line: int
    target: str
    typing_only: bool


def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            dotted = ".".join([package, *path.relative_to(folder).with_suffix("").parts])
            found[dotted.removesuffix(".__init__")] = path
    return found


def folder_of(module: str) -> str | None:
    """The architectural folder of a module: the longest entry of FOLDERS that it lies in."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in FOLDERS), None)


@cache
def edges() -> tuple[Edge, ...]:
    """Every import of both packages among themselves."""
    return tuple(_edges())


def _edges() -> Iterator[Edge]:
    known = modules()

    def resolve(name: str) -> str | None:
        while name not in known and "." in name:
            name = name.rpartition(".")[0]
        return name if name in known else None

    for source, path in known.items():
        text = path.read_text()
        nodes = list(ast.walk(parsed(text)))  # once: all modules have a million
        typing_only = {
            id(inner)
            for node in (nodes if "TYPE_CHECKING" in text else ())
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            for inner in ast.walk(node)
        }
        for node in nodes:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno} imports relatively"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # a docstring is a sentence
                names = [node.value] if _NAME.fullmatch(node.value) and node.value in known else []
            for name in names:
                target = resolve(name)
                if target is not None and target != source:
                    yield Edge(source, path, getattr(node, "lineno", 0), target, id(node) in typing_only)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components of more than one node)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = []
            while True:
                group.append(stack.pop())
                if group[-1] == node:
                    break
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def graph_of(found: list[Edge], *, by_folder: bool, typing_too: bool = False) -> dict[str, set[str]]:
    """Nodes to what they import, of modules or of folders."""
    graph: dict[str, set[str]] = defaultdict(set)
    for edge in found:
        if edge.typing_only and not typing_too:
            continue
        source = folder_of(edge.source) if by_folder else edge.source
        target = folder_of(edge.target) if by_folder else edge.target
        if source is not None and target is not None and source != target:
            graph[source].add(target)
    return graph


def main() -> None:
    found = list(edges())
    run_time, all_of_them = (graph_of(found, by_folder=True, typing_too=typing) for typing in (False, True))
    counts = defaultdict(int)
    for module in modules():
        counts[folder_of(module)] += 1
    for folder in reversed(FOLDERS):
        below = ", ".join(name for name in FOLDERS if name in run_time.get(folder, ()))
        types = ", ".join(sorted(all_of_them.get(folder, set()) - run_time.get(folder, set())))
        print(f"{folder} ({counts[folder]} modules) -> {below or 'nothing'}{f'; for types: {types}' if types else ''}")
    print("circles of folders:", circles(run_time) or "none")
    print("circles of modules:", circles(graph_of(found, by_folder=False)) or "none")


if __name__ == "__main__":
    main()
