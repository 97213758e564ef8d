"""In a browser: an answer that was cut goes on by a button, and a view whose kernel was restarted says so."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from helpers import browsing
from helpers.browsing import cell, printed, run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
sync_api = pytest.importorskip("playwright.sync_api")

SHOTS = Path(os.environ.get("REKINDLE_SCREENSHOTS", browsing.ROOT / "build" / "screenshots"))
CELLS = (
    'import rekindle\nsession = await rekindle.open("tiny", max_requests=4, max_tokens_per_step=64)\nprint("ready")',
    "session.watch()",
    "chat = session.view.chat(max_tokens=8, ignore_eos=True)\nchat",
    "print('name:', chat.name)",
)
GONE = "Its kernel was restarted or is gone"


@pytest.fixture(params=["jupyterlab", "notebook"])
def application(request: pytest.FixtureRequest) -> str:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


def test_views_of_a_restarted_kernel_are_grey_and_say_how_to_go_on(tmp_path: Path, application: str) -> None:
    shots = SHOTS / application
    shots.mkdir(parents=True, exist_ok=True)
    with (
        sync_api.sync_playwright() as playwright,
        browsing.served(tmp_path, CELLS, application=application) as address,
        browsing.opened(playwright, address) as page,
    ):
        printed(page, 0, "ready", seconds=300)
        dashboard = run(page, 1).locator(".rekindle-panel")
        chat = run(page, 2).locator(".rekindle-panel")
        line = chat.get_by_placeholder("Say something")
        line.fill("Who are you?")
        line.press("Enter")
        an_answer_that_was_cut_goes_on(chat, shots)
        name = named(page)
        assert f'kept as "{name}"' in chat.inner_text()
        restart(page)
        for view in (dashboard, chat):
            view.get_by_text(GONE).wait_for()
        page.wait_for_timeout(1000)
        page.screenshot(path=shots / "restarted.png")
        for view in (dashboard, chat):
            assert "rekindle-gone" in (view.get_attribute("class") or "")
            assert all(button.is_disabled() for button in view.locator(".rekindle-bar button").all())
        assert line.is_disabled(), "nobody types into a chat that is over"
        assert f'session.view.chat(restore="{name}") goes on with the conversation' in chat.inner_text()
        assert "Who are you?" in chat.inner_text(), "the last picture stays"
        assert "tokens" in dashboard.inner_text()


def an_answer_that_was_cut_goes_on(chat: Any, shots: Path) -> None:
    chat.get_by_text("cut at 8 tokens").wait_for()
    go_on = chat.get_by_role("button", name="Continue")
    go_on.wait_for()
    before = said(chat)
    chat.screenshot(path=shots / "chat-cut.png")
    go_on.click()
    chat.get_by_text("cut at 16 tokens").wait_for()
    assert said(chat).startswith(before)
    assert chat.locator("[data-token]").count() > 8


def said(chat: Any) -> str:
    return "".join(chat.locator("[data-token]").all_inner_texts())


def named(page: Any) -> str:
    run(page, 3)
    output = cell(page, 3).locator(".jp-OutputArea-output")
    output.get_by_text("name:").wait_for()
    return str(output.inner_text()).removeprefix("name:").strip()


def restart(page: Any) -> None:
    """Restart the kernel, as people do."""
    page.keyboard.press("Escape")
    page.keyboard.press("0")
    page.keyboard.press("0")
    page.locator("dialog.jp-Dialog button.jp-mod-accept").click()
