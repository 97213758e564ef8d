"""JupyterLab and Notebook 7 in a headless Chromium: buttons act, views are drawn, and the saved notebook keeps them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import browsing, shown
from helpers.browsing import SHOTS, cell, printed, run
from helpers.front_ends import faint

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
sync_api = pytest.importorskip("playwright.sync_api")

WIDGET = "application/vnd.jupyter.widget-view+json"
CELLS = (
    'import rekindle\nsession = await rekindle.open("tiny", max_requests=4, max_tokens_per_step=64)\n'
    'ready = await session.generate("Once", max_tokens=4)\nprint("session ready")',
    "dashboard = session.watch()\ndashboard",
    # It takes 50 s by itself: a hand that stops it may be slow.
    "import time\n"
    'view = session.view.stream("Once upon a time", max_tokens=1000, ignore_eos=True, temperature=1.0,\n'
    "                           until=lambda text, ids: time.sleep(0.05))\nview",
    'print("status:", view.handle.status, session.stats().running)',
    'await session.generate("Once upon a time, " * 40, max_tokens=2)\nsession.view.tree()',
    "chat = session.view.chat(max_tokens=24, ignore_eos=True)\nchat",
    'print("said:", len(chat.answer_ids), chat.messages)',
    "await session.aclose()\nfor each in (dashboard, chat):\n    each.join(60)\nprint('closed')",
)


@pytest.fixture(params=["jupyterlab", "notebook"])
def page(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    application = request.param
    if importlib.util.find_spec(application) is None:
        pytest.skip(f"{application} is not installed")
    shots = SHOTS / application
    shots.mkdir(parents=True, exist_ok=True)
    with (
        sync_api.sync_playwright() as playwright,
        browsing.served(tmp_path, CELLS, application=application) as address,
        browsing.opened(playwright, address) as page,
    ):
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.shots, page.folder, page.asked = shots, tmp_path, asked
        yield page
        page.screenshot(path=shots / "last.png")


def test_views_live_act_and_stay(page: Any) -> None:
    printed(page, 0, "session ready", seconds=300)  # its programs may have to be compiled
    run(page, 1)
    a_stream_is_stopped(page)
    assert cell(page, 1).locator("svg rect").count() >= 1
    the_tree_answers(page)
    the_chat_forks_at_a_token(page)
    cell(page, 1).screenshot(path=page.shots / "dashboard.png")
    printed(page, 7, "closed")
    the_saved_notebook_keeps_pictures(page)
    local = ("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:")
    assert [url for url in page.asked if not url.startswith(local)] == [], "nothing comes from the network"


def a_stream_is_stopped(page: Any) -> None:
    shown = run(page, 2)
    stop = shown.get_by_role("button", name="Stop")
    stop.wait_for()
    text = shown.locator(".jp-OutputArea-output").last  # the first is the copy, which is hidden
    page.wait_for_function("element => element.innerText.length > 150", arg=text.element_handle())
    page.screenshot(path=page.shots / "streaming.png")
    stop.press("Enter")
    stop.wait_for(state="detached")
    page.wait_for_function("() => document.activeElement?.closest('.jp-Notebook')", timeout=10_000)  # keys go on there
    stopped = text.inner_text()
    assert "stopped after" in stopped
    page.wait_for_timeout(1000)
    assert text.inner_text() == stopped, "the text went on"
    printed(page, 3, "status: aborted 0")


def the_tree_answers(page: Any) -> None:
    tree = run(page, 4).locator(".rekindle-panel")
    tree.get_by_text("Prefix cache").first.wait_for()
    tree.get_by_placeholder("What would this prompt hit?").fill("Once upon a time, Once upon a time, " * 20)
    tree.get_by_text("prompt tokens are cached").first.wait_for()
    page.screenshot(path=page.shots / "tree.png")


def the_chat_forks_at_a_token(page: Any) -> None:
    chat = run(page, 5).locator(".rekindle-panel")
    line = chat.get_by_placeholder("Say something")
    line.fill("Who are you?")
    line.press("Enter")
    chat.locator("[data-token]").nth(10).wait_for()
    answered(page, 24)
    assert line.input_value() == "", "what was sent is cleared"
    before = said(chat)
    kept = "".join(chat.locator("[data-token]").all_inner_texts()[:6])
    chat.locator("[data-token='6']").click()
    instead = chat.get_by_placeholder("what should come there instead")
    instead.fill(" penguin")
    page.screenshot(path=page.shots / "chat-marked.png")
    chat.locator(".rekindle-fork").get_by_role("button", name="Fork").click()
    instead.wait_for(state="detached")
    chat.get_by_text("penguin").wait_for()
    answered(page, 24)
    assert said(chat).startswith(kept + " penguin")
    chat.get_by_role("button", name="Again").click()
    chat.get_by_text("penguin").wait_for(state="detached")
    answered(page, 24)
    assert said(chat) == before, "greedy: the first answer once more"
    chat.get_by_role("button", name="›").click()
    chat.get_by_text("penguin").wait_for()
    chat.get_by_role("button", name="‹").click()
    chat.get_by_text("penguin").wait_for(state="detached")
    chat.locator("[data-said=user]").hover()
    chat.get_by_role("button", name="Edit").click()
    sync_api.expect(line).to_have_value("Who are you?")
    line.fill("Who is Tom?")
    chat.get_by_role("button", name="Send").click()
    chat.locator("[data-said=user]").get_by_text("Who is Tom?").wait_for()
    answered(page, 24)
    page.screenshot(path=page.shots / "chat.png")


@pytest.mark.parametrize(
    ("application", "theme", "width"),
    [("jupyterlab", "JupyterLab Dark", 1100), ("notebook", "JupyterLab Light", 620)],
)
def test_objects_and_figures_are_shown(tmp_path: Path, application: str, theme: str, width: int) -> None:
    """Each says what it is to a screen reader, can be read, and fits, in a light and a dark theme."""
    if importlib.util.find_spec(application) is None:
        pytest.skip(f"{application} is not installed")
    shots = SHOTS / application
    shots.mkdir(parents=True, exist_ok=True)
    cells = (shown.FIRST, *shown.CELLS.values())
    with (
        sync_api.sync_playwright() as playwright,
        browsing.served(tmp_path, cells, application=application, theme=theme) as address,
        browsing.opened(playwright, address, width=width) as page,
    ):
        printed(page, 0, "session ready", seconds=300)
        for index, name in enumerate(shown.CELLS, 1):
            output = run(page, index).locator(".jp-OutputArea-output").last
            output.wait_for()
            looked_at(page, output, name)
            output.screenshot(path=shots / f"{name}-{width}.png")
        page.keyboard.press("Control+s")
        page.wait_for_timeout(2000)
        saved = {name: browsing.outputs(tmp_path, index)[-1] for index, name in enumerate(shown.CELLS, 1)}
        assert all(len(kinds["text/html"]) > 50 for kinds in saved.values())


def looked_at(page: Any, output: Any, name: str) -> None:
    for _ in range(100):
        lines = [line.strip().removeprefix("- ").removeprefix("'") for line in output.aria_snapshot().splitlines()]
        missing = [role for role in shown.ROLES.get(name, []) if not any(line.startswith(role) for line in lines)]
        if not missing:
            break
        page.wait_for_timeout(100)
    assert missing == [], (name, lines)
    assert faint(page, within=output) == [], name
    right = output.evaluate("(one) => one.getBoundingClientRect().right")
    past = output.evaluate(
        """(one, right) => [...one.querySelectorAll("button, input, summary, svg")]
        .filter((part) => part.checkVisibility() && part.getBoundingClientRect().right > right + 1)
        .map((part) => part.outerHTML.slice(0, 100))""",
        right,
    )
    assert past == [], name


DYING = (
    CELLS[0],
    "chat = session.view.chat(max_tokens=24, ignore_eos=True)\nchat",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    'session = await rekindle.open("tiny", max_requests=4, max_tokens_per_step=64)\n'
    'chat = session.view.chat(restore="auto", max_tokens=24)\nchat',
)


def test_a_conversation_outlives_its_kernel(tmp_path: Path) -> None:
    """Talk, kill the kernel, reopen the saved notebook: it is there. Restart: it goes on."""
    pytest.importorskip("jupyterlab")
    (SHOTS / "jupyterlab").mkdir(parents=True, exist_ok=True)
    copy = ".jp-OutputArea-output [class^='rekindle-kept']"
    with sync_api.sync_playwright() as playwright, browsing.served(tmp_path, DYING) as address:
        with browsing.opened(playwright, address) as page:
            printed(page, 0, "session ready", seconds=300)
            chat = run(page, 1).locator(".rekindle-panel")
            line = chat.get_by_placeholder("Say something")
            line.fill("Who are you?")
            line.press("Enter")
            chat.locator("[data-token]").nth(10).wait_for()
            page.wait_for_timeout(4000)
            words = said(chat).strip()[:40]
            assert words
            assert not cell(page, 1).locator(copy).is_visible(), "nothing is shown twice"
            dialog = page.locator("dialog.jp-Dialog button")  # "appears to have died", once or twice
            page.add_locator_handler(dialog.first, lambda button: button.click())
            run(page, 2)
            chat.get_by_text("Its kernel was restarted or is gone").wait_for()
            assert line.is_disabled()
            page.screenshot(path=SHOTS / "jupyterlab" / "chat-kernel-gone.png")
            assert words in chat.inner_text()
            page.keyboard.press("Control+s")
            page.wait_for_timeout(2000)
        with browsing.opened(playwright, address) as page:
            left = cell(page, 1).locator(copy)
            left.wait_for()
            page.wait_for_timeout(3000)
            page.screenshot(path=SHOTS / "jupyterlab" / "chat-reopened.png")
            assert words in left.inner_text()
            assert "Who are you?" in left.inner_text()
            assert "session.view.chat(restore=" in left.inner_text()
            printed(page, 0, "session ready", seconds=300)
            again = run(page, 3).locator(".rekindle-panel")
            again.get_by_text(words[:20]).first.wait_for()
            line = again.get_by_placeholder("Say something")
            line.fill("Thank you")
            line.press("Enter")
            again.locator("[data-token]").nth(5).wait_for()
            page.screenshot(path=SHOTS / "jupyterlab" / "chat-restored.png")
            assert left.is_visible(), "the old one is not hidden by the new"


def said(chat: Any) -> str:
    return "".join(chat.locator("[data-token]").all_inner_texts())


def answered(page: Any, tokens: int) -> None:
    """Ask the kernel until the answer is complete."""
    for _ in range(60):
        output = run(page, 6).locator(".jp-OutputArea-output").last
        output.get_by_text("said:").wait_for()
        page.wait_for_timeout(300)
        if output.inner_text().startswith(f"said: {tokens} "):
            return
    raise AssertionError(output.inner_text())


def the_saved_notebook_keeps_pictures(page: Any) -> None:
    """Views that ended are HTML alone; the tree is still a widget, with HTML as well for readers without a kernel."""
    page.keyboard.press("Control+s")
    page.wait_for_timeout(2000)
    for index, words in ((1, "at rest"), (2, "stopped after"), (5, "Who is Tom?")):
        copy, kinds = browsing.outputs(page.folder, index)
        assert words in kinds["text/html"]
        assert WIDGET not in kinds
        assert copy["text/html"] == "", "what the view was replaced by is not there twice"
    copy, kinds = browsing.outputs(page.folder, 4)[-2:]  # what it waited for may come before
    assert {"text/html", WIDGET} <= set(kinds)
    assert WIDGET not in copy
    assert "Prefix cache" in copy["text/html"]
