"""README.md and the pages that continue it are true: Python runs, commands and methods exist, no folder is missing."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
import sys
from typing import Any

import pytest

import rekindle
from project.import_graph import FOLDERS, ROOT

README = (ROOT / "README.md").read_text()
GUIDE = ROOT / "tutorials" / "guide"
PAGES = {
    path.stem: path.read_text() for path in [*(ROOT / ".github/docs/pages").glob("*.md"), *GUIDE.glob("[a-z]*.md")]
}
DOOR = "\n".join([README, *(PAGES[name] for name in ("features", "install", "notebook", "server"))])
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOOR, re.MULTILINE | re.DOTALL)


async def run(code: str, name: str) -> dict[str, Any]:
    """Runs a cell as a notebook does, with `await` at its top level; gives the names that it defined."""
    compiled = compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {"__name__": "__main__"}
    pending = eval(compiled, names)  # runs the code; a coroutine if it awaits
    if inspect.isawaitable(pending):
        await pending
    return names


async def notebook(code: str) -> dict[str, Any]:
    """Runs a cell and closes the sessions that it opened."""
    names = await run(code, "README.md")
    for value in names.values():
        if isinstance(value, rekindle.Session):
            await value.aclose()
    return names


def test_it_is_short() -> None:
    assert len(README.split()) <= 600


def test_its_recording_is_there_in_both_themes_and_loads_at_once() -> None:
    shown = re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert sorted(path.partition("-")[2] for path in shown) == ["dark.webp", "light.webp"]
    assert all((ROOT / path).stat().st_size <= 500_000 for path in shown)


def test_the_output_that_it_shows_is_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(r"^```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    asyncio.run(notebook(BLOCKS[0]))
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.partition("\n")[0])
def test_its_python_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = asyncio.run(notebook(code))
    printed = capsys.readouterr().out
    if "done" in names:
        assert isinstance(names["done"], rekindle.Completion) and names["done"].text in printed
        assert names["reply"].text
    if "answers" in names:
        assert len(names["answers"]) == 3


def test_code_that_fails_is_noticed() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        asyncio.run(run("import rekindle\nawait rekindle.nonsense('tiny')", "README.md"))


def test_methods_that_its_text_names_exist() -> None:
    named = set(re.findall(r"`session\.(\w+)", DOOR))
    assert named, "README.md names no method of a session"
    missing = sorted(name for name in named if name not in dir(rekindle.Session) and name not in _made_in_init())
    assert not missing, f"Session has no {', '.join(missing)}"


def _made_in_init() -> set[str]:
    return set(re.findall(r"self\.(\w+)", inspect.getsource(rekindle.Session.__init__)))


def test_commands_that_it_shows_exist() -> None:
    shown = set(re.findall(r"^rekindle (\w+)", DOOR, re.MULTILINE)) | set(re.findall(r"`rekindle (\w+)", DOOR))
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
    tree = PAGES["inside"].partition("## The tree")[2].partition("```")[2].partition("```")[0]
    shown = {name for line in tree.splitlines() for name in re.findall(r"(?:^|\s)(\w+)/", line[:28])}
    private = {folder.rpartition(".")[2] for folder in FOLDERS if "._src." in folder}
    there = {path.name for path in (ROOT / "toolkit/rekindle/_src").iterdir() if (path / "__init__.py").exists()}
    assert private == there, "FOLDERS of import_graph.py is not what lies in _src"
    assert there <= shown, f"the tree lacks {sorted(there - shown)}"
    order = [name for line in tree.splitlines() for name in re.findall(r"(\w+)/", line[:28]) if name in there]
    assert sorted(order) == sorted(there), "the tree names a folder twice"


def test_every_extra_is_named() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    install = PAGES["install"].partition("## Extras")[2]
    missing = [name for name in project["optional-dependencies"] if f"`{name}`" not in install and name != "test"]
    assert not missing, f"the page on installing does not name the extras {missing}"


def test_every_tutorial_is_in_the_list() -> None:
    listed = (ROOT / "tutorials/README.md").read_text()
    missing = [
        path.name for path in sorted((ROOT / "tutorials/course").glob("[0-9]*.ipynb")) if path.name not in listed
    ]
    assert not missing
