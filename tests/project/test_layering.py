"""Imports point down: no folder imports from one above it, and no modules import each other in a circle."""

from __future__ import annotations

import ast
import re

from project.import_graph import FOLDERS, PACKAGES, ROOT, circles, edges, folder_of, graph_of, modules
from project.sources import parsed

HOST = tuple(
    f"rekindle._src.{folder}"
    for folder in (
        "core",
        "dispatch",
        "capabilities",
        "views",
        "notebook",
        "serve",
        "calls",
        "evaluation",
        "session",
        "replicas",
        "shelf",
        "cli",
    )
)


def test_a_folder_imports_only_from_those_below_it() -> None:
    upwards = [
        f"{edge.path.relative_to(ROOT)}:{edge.line}: {edge.source} imports {edge.target}"
        for edge in edges()
        if not edge.typing_only
        and edge.source != "rekindle"  # its lazy exports reach every folder
        and FOLDERS.index(folder_of(edge.target) or "") > FOLDERS.index(folder_of(edge.source) or "")
    ]
    assert not upwards, "\n".join(upwards)


def test_rooms_below_the_views_draw_nothing() -> None:
    """No tag of HTML or SVG is written there: their types are drawn by the table in `views/drawing.py`."""
    views = FOLDERS.index("rekindle._src.views")
    drawn = re.compile(r"</(?:a|code|details|div|li|p|span|style|svg|table|td)>")
    below = {module: path for module, path in modules().items() if FOLDERS.index(folder_of(module) or "") < views}
    assert [module for module, path in below.items() if drawn.search(path.read_text())] == []


def test_types_come_from_below_too() -> None:
    """A folder that needs a type from above it names what it uses of it, in a protocol of its own."""
    upwards = [
        f"{edge.path.relative_to(ROOT)}:{edge.line}: {edge.source} takes types from {edge.target}"
        for edge in edges()
        if edge.typing_only
        and edge.source != "rekindle"
        and FOLDERS.index(folder_of(edge.target) or "") > FOLDERS.index(folder_of(edge.source) or "")
    ]
    assert not upwards, "\n".join(upwards)


PUBLIC_UNDERSCORED = {"_asdict", "_fields", "_replace"}  # of named tuples


def test_no_module_reaches_into_the_privates_of_another() -> None:
    """Private attributes are used where they are defined: through `self`, or in the same file.

    Those of other packages (`os._exit`, `ray._private`) are another matter.
    """
    reaches: list[str] = []
    for module, path in modules().items():
        if not module.startswith(HOST):
            continue
        nodes = list(ast.walk(parsed(path.read_text())))
        defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        defined |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        reaches += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
            for node in nodes
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and node.attr not in defined | PUBLIC_UNDERSCORED
            and not node.attr.endswith("_")  # Jupyter's names, such as _repr_html_
            and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os", "ray"))
        ]
    assert not reaches, "\n".join(reaches)


def test_packages_do_not_need_the_workshops() -> None:
    """Installations have none of the folders next to the packages."""
    names = {path.name for folder in ("toolkit", "kernels") for path in (ROOT / folder).iterdir()} - set(PACKAGES)
    assert {"workshop", "kernel_workshop"} <= names
    for path in modules().values():
        imports = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
        assert not names & set(imports), f"{path.relative_to(ROOT)} imports from a folder that the wheel does not have"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and by name count too: they only hide a circle."""
    found = [edge for edge in edges() if edge.target != "rekindle" and edge.source != "rekindle"]
    assert circles(graph_of(found, by_folder=False)) == []
    assert circles(graph_of(found, by_folder=True)) == []
    assert circles(graph_of(found, by_folder=False, typing_too=True)) == [], "imports of types"


def test_every_module_lies_in_a_folder_of_the_architecture() -> None:
    loose = [module for module in modules() if folder_of(module) == "rekindle" and module.count(".") > 1]
    assert not loose, f"{loose} lie in no folder of FOLDERS"


def test_the_top_level_holds_only_what_is_public() -> None:
    package = ROOT / "toolkit" / "rekindle"
    entries = {path.name for path in package.iterdir() if path.name != "__pycache__"}
    assert len(entries) <= 18, sorted(entries)
    loose = {name for name in entries if name.endswith(".py")}
    public = {
        "errors.py", "inspect_ai.py", "lm_eval.py", "models.py", "ray.py", "serve.py", "trl.py", "tunix.py"
    }  # fmt: skip
    assert loose <= {"__init__.py", "__main__.py", *public}, sorted(loose)


def test_kernels_import_nothing_of_the_toolkit() -> None:
    found = [edge for edge in edges() if edge.source.startswith("rekindle_kernels")]
    assert [edge for edge in found if not edge.target.startswith("rekindle_kernels")] == []


def test_the_toolkit_uses_kernels_by_their_operations_alone() -> None:
    """The operation decides which implementation serves a call, so no other module names one."""
    found = {edge.target for edge in edges() if edge.source.startswith("rekindle.")}
    kernels = {target for target in found if target.startswith("rekindle_kernels")}
    forms = {"rekindle_kernels.int4"}  # how matrices are stored, whatever computes with them
    files = {"rekindle_kernels.private_files", "rekindle_kernels.read_through"}  # of the cache folder and its backing
    calls = {"rekindle_kernels.system"}  # of the operating system
    assert kernels == {"rekindle_kernels", "rekindle_kernels.deprecated"} | files | forms | calls


def test_kernels_do_not_read_the_toolkits_settings() -> None:
    sources = (ROOT / "kernels").rglob("*.py")
    assert [path for path in sources if "REKINDLE_CACHE" in path.read_text()] == []


def test_containers_are_no_packages() -> None:
    assert not (ROOT / "toolkit" / "__init__.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()
