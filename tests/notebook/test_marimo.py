"""marimo: reprs, `await` in a cell, and views, as its own export of an executed notebook has them, and in a browser."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers import shown
from helpers.browsing import blank_page, running

pytest.importorskip("marimo")

ROOT = Path(__file__).parent.parent.parent
CELLS = {
    "session": "sessions.fake_session(step_seconds=0.002)",
    "done": 'await session.generate("hello", max_tokens=20, logprobs=1)',
    "many": 'await session.generate(["hello", "you"], max_tokens=20)',
    "handle": 'session.submit("hello", max_tokens=20)',
    "stats": "(done, session.stats())[1]",  # marimo runs it after the cell of `done`
    "views": "session.view",
    "dashboard": "session.watch()",
    "stream": 'session.view.stream("hello", max_tokens=400)',
    "chat": 'session.view.chat(max_tokens=20, template="{{ messages[0].content }}")',
    "tree": "session.view.tree()",
    **{name: shown.CELLS[name] for name in ("attention", "lens", "distribution", "prefixes", "explain")},
    "cache": "(done, session.cache)[1]",
}
VIEWS = ("dashboard", "stream", "chat", "tree")


def notebook() -> str:
    cells = ["@app.cell\ndef _():\n    from helpers import sessions, shown\n    return sessions, shown\n"]
    for name, code in CELLS.items():
        takes = ", ".join(word for word in ("sessions", "session", "shown", "done") if re.search(rf"\b{word}\b", code))
        start = "async def" if code.startswith("await") else "def"
        cells.append(f"@app.cell\n{start} _({takes}):\n    {name} = {code}\n    {name}\n    return ({name},)\n")
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
    return {name: cell["outputs"][0] for name, cell in zip(CELLS, cells[1:], strict=True)}


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("session", "rekindle session: fake"),
        ("done", "20 tokens, cut at max_tokens"),
        ("handle", "<div"),
        ("stats", "Session over fake"),
        ("views", "session.view.chat"),
        ("attention", "position 0"),
        ("lens", "layer 3: the answer"),
        ("cache", "tokens on the device"),
        ("explain", "timeline"),
    ],
)
def test_objects_show_themselves(outputs: dict[str, Any], name: str, word: str) -> None:
    assert outputs[name]["type"] == "data", outputs[name]
    assert word in outputs[name]["data"]["text/html"]


def test_a_list_of_completions_shows_its_texts(outputs: dict[str, Any]) -> None:
    assert "2 completions · 40 tokens" in outputs["many"]["data"].get("text/html", ""), outputs["many"]


@pytest.mark.parametrize("name", [*VIEWS, "distribution", "prefixes"])
def test_views_and_figures_are_widgets(outputs: dict[str, Any], name: str) -> None:
    assert "<marimo-anywidget" in outputs[name]["data"]["text/html"], outputs[name]


def test_the_page_gets_what_the_widgets_hold(executed: Path) -> None:
    page = (executed / "views.html").read_text()
    for words in ("tokens/s", "Say something", "What would this prompt hit?"):
        assert words in page, words


EDITED = """import marimo

app = marimo.App()


@app.cell
async def _():
    import os, pathlib, rekindle
    session = await rekindle.open("tiny", max_requests=4, max_tokens_per_step=64)
    session
    return os, pathlib, session


@app.cell
def _(session):
    dashboard = session.watch()
    dashboard
    return


@app.cell
def _(os, pathlib, session):
    kept = list((pathlib.Path(os.environ["REKINDLE_CACHE"]) / "chats").glob("*.json"))
    chat = session.view.chat(restore="auto" if kept else None, max_tokens=8, ignore_eos=True)
    chat
    return
"""


@contextmanager
def edited(folder: Path) -> Iterator[str]:
    """The address of a marimo that edits the notebook."""
    (folder / "views.py").write_text(EDITED)
    path = os.pathsep.join(str(ROOT / name) for name in ("toolkit", "kernels"))
    environment = os.environ | {"PYTHONPATH": path, "REKINDLE_CACHE": str(folder / "cache"), "HOME": str(folder)}
    command = [sys.executable, "-m", "marimo", "edit", "views.py", "--headless", "--no-token", "--skip-update-check"]
    with running([*command, "--host=127.0.0.1"], folder, environment, health="/health") as address:
        yield address


def run_everything(page: Any) -> Any:
    """Run all cells; gives the dashboard and the chat."""
    page.locator(".cm-content").first.click()
    page.keyboard.press("Control+Shift+r")
    panels = page.locator(".rekindle-panel")
    panels.nth(1).wait_for()
    page.wait_for_timeout(1000)
    page.wait_for_function("() => document.querySelector('[data-status=running], [data-status=queued]') === null")
    return panels.nth(0), panels.nth(1)


def say(page: Any, chat: Any, text: str) -> None:
    """Send a message; again if marimo, which may have run its cells by itself, runs them once more meanwhile."""
    for _ in range(5):
        chat.get_by_placeholder("Say something").fill(text)
        chat.get_by_placeholder("Say something").press("Enter")
        for _ in range(50):
            if chat.locator("[data-said=user]", has_text=text).count():
                page.wait_for_timeout(1500)
                if chat.locator("[data-said=user]", has_text=text).count():
                    return
            page.wait_for_timeout(200)
    raise AssertionError(chat.inner_text())


@pytest.mark.browser
@pytest.mark.timeout(600)
def test_views_act_and_a_conversation_outlives_a_restart(tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    with (
        sync_api.sync_playwright() as playwright,
        edited(tmp_path) as address,
        blank_page(playwright) as page,
    ):
        page.goto(address)
        dashboard, chat = run_everything(page)
        say(page, chat, "Who are you?")
        chat.get_by_text("cut at 8 tokens").wait_for()
        before = "".join(chat.locator("[data-token]").all_inner_texts())
        chat.get_by_role("button", name="Continue").click()
        chat.get_by_text("cut at 16 tokens").wait_for()
        assert "".join(chat.locator("[data-token]").all_inner_texts()).startswith(before)
        dashboard.get_by_text("2 requests finished").wait_for()
        page.wait_for_timeout(3000)  # the conversation is kept two seconds after a change
        page.keyboard.press("Escape")
        page.keyboard.press("Control+k")
        page.keyboard.type("Restart kernel")
        page.get_by_role("option", name="Restart kernel").first.click()
        page.get_by_role("button", name="Restart").last.click()
        dashboard.wait_for(state="detached")  # marimo takes away what it can't keep alive
        page.locator(".cm-content").first.wait_for()
        _, chat = run_everything(page)
        chat.locator("[data-said=user]").get_by_text("Who are you?").wait_for()
        assert before.strip() in chat.inner_text(), "the conversation goes on where it was"
        say(page, chat, "Thank you")
        chat.get_by_text("cut at 8 tokens").wait_for()
