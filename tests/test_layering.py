"""A file imports only from its own layer or a lower one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"rekindle": ROOT / "toolkit" / "rekindle", "rekindle_kernels": ROOT / "kernels" / "rekindle_kernels"}
LAYERS = {
    "rekindle_kernels": 0,
    "rekindle.errors": 1,
    "rekindle.config": 1,
    "rekindle.records": 1,
    "rekindle.garbage": 1,
    "rekindle.html": 1,
    "rekindle.memory": 1,
    "rekindle.progress": 1,
    "rekindle.saving": 1,
    "rekindle.models": 2,
    "rekindle.cache": 3,
    "rekindle.engine": 4,
    "rekindle.text": 4,
    "rekindle.reference": 4,
    "rekindle.tasks": 5,
    "rekindle.assemble": 6,
    "rekindle.cachereport": 6,
    "rekindle.figures": 6,
    "rekindle.cacheview": 6,
    "rekindle.call": 6,
    "rekindle.handle": 6,
    "rekindle.keeper": 6,
    "rekindle.opening": 6,
    "rekindle.pausing": 6,
    "rekindle.prompts": 6,
    "rekindle.report": 6,
    "rekindle.session": 6,
    "rekindle.views": 6,
    "rekindle.tiny": 7,
    "rekindle.bench": 7,
    "rekindle.notebook": 7,
    "rekindle.cli": 7,
    "rekindle.__main__": 7,
    "rekindle": 7,
}


def layer_of(module: str) -> int | None:
    """Of the longest prefix in LAYERS; plain `rekindle` stands for its lazy exports, which reach every layer."""
    parts = module.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((LAYERS[prefix] for prefix in prefixes if prefix in LAYERS), None)


def modules() -> list[tuple[str, Path]]:
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            dotted = [package, *path.relative_to(folder).with_suffix("").parts]
            found.append((".".join(dotted).removesuffix(".__init__"), path))
    return found


def imports(module: str, path: Path) -> list[tuple[int, str]]:
    """Every module that the file imports, at the top or inside functions, except for type checking only."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_file_imports_only_its_own_layer_or_a_lower_one(module: str, path: Path) -> None:
    mine = layer_of(module)
    assert mine is not None
    for line, target in imports(module, path):
        other = layer_of(target)
        if other is None:
            continue
        assert other <= mine, f"{path}:{line}: {module} (layer {mine}) imports {target} (layer {other})"


def test_every_module_has_its_layer_in_the_table() -> None:
    missing = [
        module
        for module, _ in modules()
        if module.startswith("rekindle.") and ".".join(module.split(".")[:2]) not in LAYERS
    ]
    assert not missing, f"add {missing} to LAYERS"


def test_kernels_import_nothing_of_rekindle() -> None:
    for module, path in modules():
        if module.startswith("rekindle_kernels"):
            for line, target in imports(module, path):
                assert not target.startswith("rekindle."), f"{path}:{line} imports {target}"


def test_containers_are_no_packages() -> None:
    assert not (ROOT / "toolkit" / "__init__.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()
