"""What a saved notebook keeps of each view when its kernel is gone: a picture in HTML, which any viewer shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest

nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parent.parent.parent
WIDGET = "application/vnd.jupyter.widget-view+json"
FIRST = """
import time
from rekindle._src.notebook import Progress
from rekindle._src.models.loading.load_progress import LoadProgress as Loaded
from helpers.sessions import fake_session
session = fake_session(step_seconds=0.002)
session.chat = lambda messages, **options: session.generate(messages[-1]["content"], **options)
"""
SHOW = {
    "dashboard": "view = session.watch(); view",
    "stream": "view = session.view.stream('hello', max_tokens=20); view",
    "chat": "view = session.view.chat(max_tokens=20); view.send('hello'); view",
    "tree": "await session.generate('hello ' * 20, max_tokens=2); view = session.view.tree(); view",
}
WORDS = {"dashboard": "Session over fake", "stream": "ended by length", "chat": "assistant", "tree": "Prefix cache"}


def executed(*cells: str) -> Any:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    path = os.pathsep.join(str(ROOT / name) for name in ("toolkit", "kernels", "tests"))
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=120, store_widget_state=False)
    client.execute(env=os.environ | {"PYTHONPATH": path})
    return notebook


@pytest.fixture(scope="module")
def saved() -> dict[tuple[str, str], Any]:
    """The outputs of each view, shown while it lives and ended in a later cell, or left open when the kernel dies."""
    names = list(SHOW)
    ends = {
        "stream": "view.handle.result_sync(); view.join(10)",
        "chat": "view.handle.result_sync(); view.stop(); view.join(10)",
    }
    cells = [FIRST]
    for name in names:
        cells += [SHOW[name], ends.get(name, "view.stop(); view.join(10)")]
    cells += [f"{SHOW[name].removesuffix('; view')}; display(view); time.sleep(0.3)" for name in names]
    cells += [
        "bar = Progress('loading')\nbar._last -= 1\nbar(Loaded(1, 4, 1.0))\nbar(Loaded(4, 4, 2.0))",
        "session.stats()",
    ]
    found = executed(*cells).cells
    ended = {(name, "ended"): found[1 + 2 * index].outputs[-1] for index, name in enumerate(names)}
    left = {(name, "left"): found[1 + 2 * len(names) + index].outputs[-1] for index, name in enumerate(names)}
    return {**ended, **left, ("progress", ""): found[-2].outputs[0], ("stats", ""): found[-1].outputs[0]}


@pytest.mark.parametrize("name", ["dashboard", "stream", "chat"])
def test_a_view_that_ended_is_html_alone(saved: dict[tuple[str, str], Any], name: str) -> None:
    data = saved[name, "ended"].data
    assert set(data) == {"text/html", "text/plain"}
    assert WORDS[name] in data["text/html"]
    assert "ended" in data["text/plain"]


@pytest.mark.parametrize("name", SHOW)
def test_a_view_that_was_left_open_has_html_beside_the_widget(saved: dict[tuple[str, str], Any], name: str) -> None:
    data = saved[name, "left"].data
    assert WIDGET in data or name == "stream", "a stream may have ended by itself"
    assert len(data["text/html"]) > 50
    assert "<script" not in data["text/html"]


def test_progress_leaves_its_last_line(saved: dict[tuple[str, str], Any]) -> None:
    data = saved["progress", ""].data
    assert set(data) == {"text/html", "text/plain"}
    assert "loading" in data["text/html"]
    assert "title=" not in data["text/html"], "no half a bar"


def test_objects_are_html(saved: dict[tuple[str, str], Any]) -> None:
    assert "<table" in saved["stats", ""].data["text/html"]
