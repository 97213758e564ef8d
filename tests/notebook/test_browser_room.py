"""A chat at the end of its context in JupyterLab: a refused message comes back, and a button makes room for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers import browsing
from helpers.browsing import SHOTS, printed, run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
sync_api = pytest.importorskip("playwright.sync_api")

CELLS = (
    'import rekindle\nsession = await rekindle.open("tiny", max_requests=2, max_tokens_per_step=64,\n'
    '                              max_model_len=128, precompile="lazy", quiet=True)\nprint("session ready")',
    'chat = session.view.chat(max_tokens=8, ignore_eos=True, overflow="refuse")\nchat',
    'print("said:", [one["content"][:1] for one in chat.messages if one["role"] == "user"])',
)
LABEL = "Drop the oldest turn and send"
FIRST, SECOND, THIRD = (letter + " cat and a dog went home." * 5 for letter in "ABC")


def test_a_button_makes_room_at_the_end_of_the_context(tmp_path: Path) -> None:
    pytest.importorskip("jupyterlab")
    (SHOTS / "jupyterlab").mkdir(parents=True, exist_ok=True)
    with (
        sync_api.sync_playwright() as playwright,
        browsing.served(tmp_path, CELLS) as address,
        browsing.opened(playwright, address) as page,
    ):
        printed(page, 0, "session ready", seconds=300)
        chat = run(page, 1).locator(".rekindle-panel")
        line = chat.get_by_placeholder("Say something")
        button = chat.get_by_role("button", name=LABEL)
        for text in (FIRST, SECOND):
            say(line, text)
            chat.locator("[data-said=user]").get_by_text(text).wait_for()
            sync_api.expect(chat.locator("[data-token='7']")).to_have_count(1)
        assert button.count() == 0
        say(line, THIRD)
        chat.get_by_text("Not sent: the conversation with this message").wait_for()
        sync_api.expect(line).to_have_value(THIRD)
        button.wait_for()
        page.screenshot(path=SHOTS / "jupyterlab" / "chat-full.png")
        printed(page, 2, "said: ['A', 'B']")
        button.click()
        chat.locator("[data-said=user]").get_by_text(THIRD).wait_for()
        sync_api.expect(chat.locator("[data-said=user]").get_by_text(FIRST)).to_have_count(0)
        sync_api.expect(chat.locator("[data-token='7']")).to_have_count(1)
        sync_api.expect(button).to_have_count(0)
        sync_api.expect(line).to_have_value("")
        page.screenshot(path=SHOTS / "jupyterlab" / "chat-with-room.png")
        printed(page, 2, "said: ['B', 'C']")


def say(line: Any, text: str) -> None:
    line.fill(text)
    line.press("Enter")
