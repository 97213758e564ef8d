"""marimo, headless: reprs, `await` in a cell, and views, as its own export of an executed notebook has them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("marimo")

ROOT = Path(__file__).parent.parent.parent
CELLS = {
    "session": (
        "session",
        "    from helpers.sessions import fake_session\n    session = fake_session(step_seconds=0.002)\n    session\n",
    ),
    "completion": (
        "done",
        '    done = await session.generate("hello", max_tokens=20, logprobs=1)\n    done\n',
    ),
    "list": ("many", '    many = await session.generate(["hello", "you"], max_tokens=20)\n    many\n'),
    "handle": ("handle", '    handle = session.submit("hello", max_tokens=20)\n    handle\n'),
    "stats": ("stats", "    stats = done, session.stats()\n    stats[1]\n"),
    "views": ("views", "    session.view\n"),
    "dashboard": ("dashboard", "    dashboard = session.watch()\n    dashboard\n"),
    "stream": ("stream", '    stream = session.view.stream("hello", max_tokens=400)\n    stream\n'),
    "chat": ("chat", "    chat = session.view.chat(max_tokens=20)\n    chat\n"),
    "tree": ("tree", "    tree = session.view.tree()\n    tree\n"),
}
VIEWS = ("dashboard", "stream", "chat", "tree")


def notebook() -> str:
    cells = []
    for name, (made, source) in CELLS.items():
        takes = ", ".join(word for word in ("session", "done") if re.search(rf"\b{word}\b", source) and word != made)
        takes = "" if name == "session" else takes
        gives = f"    return ({made},)\n" if name != "views" else "    return\n"
        cells.append(f"@app.cell\n{'async ' * ('await' in source)}def _({takes}):\n{source}{gives}")
    return "import marimo\n\napp = marimo.App()\n\n\n" + "\n\n".join(cells)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("marimo")
    (folder / "views.py").write_text(notebook())
    path = os.pathsep.join(str(ROOT / name) for name in ("toolkit", "kernels", "tests"))
    for command in (["session", "views.py"], ["html", "views.py", "-o", "views.html"]):
        subprocess.run(
            [sys.executable, "-m", "marimo", "export", *command],
            cwd=folder, env=os.environ | {"PYTHONPATH": path}, check=True, timeout=240, capture_output=True,
        )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def outputs(executed: Path) -> dict[str, Any]:
    """What each cell shows, by its name."""
    cells = json.loads((executed / "__marimo__" / "session" / "views.py.json").read_text())["cells"]
    return {name: cell["outputs"][0] for name, cell in zip(CELLS, cells, strict=True)}


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("session", "rekindle session: fake"),
        ("completion", "20 tokens, cut at max_tokens"),
        ("handle", "<div"),
        ("stats", "Session over fake"),
        ("views", "session.view.chat"),
    ],
)
def test_objects_show_themselves(outputs: dict[str, Any], name: str, word: str) -> None:
    assert outputs[name]["type"] == "data", outputs[name]
    assert word in outputs[name]["data"]["text/html"]


def test_a_list_of_completions_shows_its_texts(outputs: dict[str, Any]) -> None:
    assert "2 completions · 40 tokens" in outputs["list"]["data"].get("text/html", ""), outputs["list"]


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_widgets(outputs: dict[str, Any], name: str) -> None:
    assert "<marimo-anywidget" in outputs[name]["data"]["text/html"], outputs[name]


def test_the_page_gets_what_the_widgets_hold(executed: Path) -> None:
    page = (executed / "views.html").read_text()
    for words in ("tokens/s", "Say something", "What would this prompt hit?"):
        assert words in page, words
