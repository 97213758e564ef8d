"""What README.md shows is what happens: its Python runs, its commands exist, its map shows the folders there are."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rekindle
from project.import_graph import FOLDERS, ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


async def run(code: str, name: str) -> dict[str, Any]:
    """Runs a cell as a notebook does, with `await` at its top level; gives the names that it defined."""
    compiled = compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {"__name__": "__main__"}
    pending = eval(compiled, names)  # runs the code; a coroutine if it awaits
    if inspect.isawaitable(pending):
        await pending
    return names


def test_readme_has_python() -> None:
    assert BLOCKS, "README.md shows no Python"


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.partition("\n")[0])
def test_its_python_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def notebook() -> dict[str, Any]:
        names = await run(code, "README.md")
        for value in names.values():
            if isinstance(value, rekindle.Session):
                await value.aclose()
        return names

    names = asyncio.run(notebook())
    printed = capsys.readouterr().out
    if "done" in names:
        assert isinstance(names["done"], rekindle.Completion) and names["done"].text in printed
        assert len(names["answers"]) == 3
        assert names["reply"].text


def test_code_that_fails_is_noticed() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        asyncio.run(run("import rekindle\nawait rekindle.nonsense('tiny')", "README.md"))


def test_methods_that_its_text_names_exist() -> None:
    named = set(re.findall(r"`session\.(\w+)", README))
    assert named, "README.md names no method of a session"
    missing = sorted(name for name in named if name not in dir(rekindle.Session) and name not in _made_in_init())
    assert not missing, f"Session has no {', '.join(missing)}"


def _made_in_init() -> set[str]:
    return set(re.findall(r"self\.(\w+)", inspect.getsource(rekindle.Session.__init__)))


def test_commands_that_it_shows_exist() -> None:
    shown = set(re.findall(r"^rekindle (\w+)", README, re.MULTILINE)) | set(re.findall(r"`rekindle (\w+)", README))
    out = subprocess.run(
        [sys.executable, "-m", "rekindle", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT / "toolkit",
        env={"PATH": "", "PYTHONPATH": f"{ROOT / 'toolkit'}:{ROOT / 'kernels'}"},
        timeout=120,
        check=True,
    ).stdout
    missing = sorted(name for name in shown if not re.search(rf"\b{name}\b", out))
    assert shown and not missing, f"there is no command {', '.join(missing)}"


def test_its_tree_shows_the_folders_that_are_there() -> None:
    tree = README.partition("## The tree")[2].partition("```")[2].partition("```")[0]
    shown = {name for line in tree.splitlines() for name in re.findall(r"(?:^|\s)(\w+)/", line[:28])}
    private = {folder.rpartition(".")[2] for folder in FOLDERS if "._src." in folder}
    there = {path.name for path in (ROOT / "toolkit/rekindle/_src").iterdir() if (path / "__init__.py").exists()}
    assert private == there, "FOLDERS of import_graph.py is not what lies in _src"
    assert there <= shown, f"README's tree lacks {sorted(there - shown)}"
    order = [name for line in tree.splitlines() for name in re.findall(r"(\w+)/", line[:28]) if name in there]
    assert sorted(order) == sorted(there), "README's tree names a folder twice"


def test_every_extra_is_named() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    install = README.partition("## Install")[2].partition("\n## ")[0]
    missing = [name for name in project["optional-dependencies"] if f"`{name}`" not in install and name != "test"]
    assert not missing, f"README's Install does not name the extras {missing}"


def test_every_tutorial_is_in_its_list() -> None:
    missing = [path.name for path in sorted(Path(ROOT / "tutorials").glob("[0-9]*.ipynb")) if path.name not in README]
    assert not missing
