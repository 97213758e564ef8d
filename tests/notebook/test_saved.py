"""What a saved notebook keeps of each view when its kernel is gone: a picture in HTML, which any viewer shows."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent.parent
WIDGET = "application/vnd.jupyter.widget-view+json"
FIRST = """
import time
from rekindle._src.notebook import Progress
from rekindle._src.models.loading.load_progress import LoadProgress as Loaded
from helpers.sessions import fake_session
session = fake_session(step_seconds=0.002)
session.chat = lambda messages, overflow=None, **options: session.generate(messages[-1]["content"], **options)
"""
SHOW = {
    "dashboard": "view = session.watch(); view",
    "stream": "view = session.view.stream('hello', max_tokens=20); view",
    "chat": "view = session.view.chat(max_tokens=20); view.send('hello'); view",
    "tree": "await session.generate('hello ' * 20, max_tokens=2); view = session.view.tree(); view",
}
WORDS = {"dashboard": "Session over fake", "stream": "cut at max_tokens", "chat": "assistant", "tree": "Prefix cache"}


def executed(*cells: str, **environment: str) -> Any:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    execute(notebook, **environment)
    return notebook


def execute(notebook: Any, **environment: str) -> None:
    path = os.pathsep.join(str(ROOT / name) for name in ("toolkit", "kernels", "tests"))
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=120, store_widget_state=False)
    client.execute(env=os.environ | {"PYTHONPATH": path} | environment)


@pytest.fixture(scope="module")
def saved() -> dict[tuple[str, str], Any]:
    """The outputs of each view, shown while it lives and ended in a later cell, or left open when the kernel dies."""
    names = list(SHOW)
    ends = {
        "stream": "view.handle.result_sync(); view.join(60)",
        "chat": "view.handle.result_sync(); view.stop(); view.join(60)",
    }
    cells = [FIRST]
    for name in names:
        cells += [SHOW[name], ends.get(name, "view.stop(); view.join(60)")]
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


DYING = """
import os, signal, time
chat = session.view.chat(max_tokens=20)
chat"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """The notebook of a kernel that is killed in the middle of a conversation, and the cache folder that it had."""
    cache = str(tmp_path_factory.mktemp("cache"))
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(source)
            for source in (
                FIRST,
                DYING,
                "stream = session.view.stream('what', max_tokens=480)\nstream",
                "tree = session.view.tree(); tree",
                "chat.send('hello **you**')\nchat._handle.result_sync()\nchat.send('and <you>?')\n"
                "chat.handle.result_sync()\ntree.refresh()\ntime.sleep(4)\nsaid = chat.answer\nprint(said)",
                "os.kill(os.getpid(), signal.SIGKILL)",
            )
        ]
    )
    with pytest.raises(nbclient.exceptions.DeadKernelError):
        execute(notebook, REKINDLE_CACHE=cache)
    return notebook, cache


def test_a_killed_kernel_leaves_what_its_views_showed(killed: tuple[Any, str]) -> None:
    cells = killed[0].cells
    copy, widget = cells[1].outputs
    said = cells[4].outputs[0].text.strip()
    assert WIDGET in widget.data
    assert WIDGET not in copy.data, "JupyterLab shows an error in place of a widget without its kernel"
    shown = copy.data["text/html"]
    for words in ("hello", "you", "and &lt;you&gt;?", "restore=&quot;"):
        assert words in shown, words
    assert "Nothing was said yet" not in shown
    assert "<script" not in shown
    assert html.escape(said)[-5:] in re.sub(r"<[^>]*>", "", shown)
    hidden = re.search(r'<div class="(rekindle-kept-[0-9a-f]+)">', shown)
    assert hidden, "the widget hides it by this class while it is shown"
    assert "tokens from 0 on" in cells[3].outputs[0].data["text/html"], "the tree as it was after Refresh"


def test_a_new_kernel_takes_the_conversation_up(killed: tuple[Any, str]) -> None:
    before, cache = killed
    said = before.cells[4].outputs[0].text.strip()
    named = re.search(r'restore="([^"]+)"', html.unescape(before.cells[1].outputs[0].data["text/html"]))
    assert named
    notebook = executed(
        FIRST,
        f"chat = session.view.chat(restore={named[1]!r}, max_tokens=20); chat",
        "for message in chat.messages: print(message['role'], message['content'])",
        "chat.send('more'); chat.handle.result_sync(); print([message['role'] for message in chat.messages])",
        "print(session.view.chat(restore='auto').name == chat.name)",
        REKINDLE_CACHE=cache,
    )
    assert "hello" in notebook.cells[1].outputs[0].data["text/html"]
    roles = [line.split(" ")[0] for line in notebook.cells[2].outputs[0].text.splitlines()]
    assert roles[0] == "user"
    assert notebook.cells[2].outputs[0].text.strip().endswith(f"assistant {said}")
    assert notebook.cells[3].outputs[0].text.strip() == "['user', 'assistant', 'user', 'assistant', 'user']"
    assert notebook.cells[4].outputs[0].text.strip() == "True"
