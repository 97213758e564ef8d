"""Pictures in a chat view of JupyterLab, in a headless Chromium: chosen, dropped, pasted, refused, sent and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers import browsing, picture_models, seeing
from helpers.browsing import SHOTS, printed, run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
sync_api = pytest.importorskip("playwright.sync_api")

OPEN = """import rekindle
session = await rekindle.open(
    "FOLDER", dtype="float32", max_requests=2, max_tokens_per_step=48, max_model_len=512, page_size=16,
    device_pages=80, precompile="lazy", quiet=True,
)
print("session ready")"""
CELLS = (
    OPEN,
    "chat = session.view.chat(max_tokens=8, ignore_eos=True)\nchat",
    'words = await rekindle.open("tiny", max_requests=2, max_tokens_per_step=64, quiet=True)\nwords.view.chat()',
)
# A file as a page has it, in what drops and the clipboard carry.
TRANSFER = """([name, kind, content]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([Uint8Array.from(atob(content), (one) => one.charCodeAt(0))], name, { type: kind }));
  return transfer;
}"""
LARGE = """() => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([new Uint8Array(6 * 2 ** 20 + 1)], "large.png", { type: "image/png" }));
  return transfer;
}"""
PASTE = """(line, transfer) => line.dispatchEvent(
  new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true }))"""


def test_a_chat_takes_pictures(tmp_path: Path) -> None:
    pytest.importorskip("jupyterlab")
    (SHOTS / "jupyterlab").mkdir(parents=True, exist_ok=True)
    folder = picture_models.written("qwen3-vl", tmp_path / "model")
    chosen = tmp_path / "chosen.png"
    chosen.write_bytes(seeing.png(seeing.noise(1, 96, 64)))
    largest = tmp_path / "largest.png"
    largest.write_bytes(seeing.png(seeing.noise(4, 1440, 1440)).ljust(6 << 20, b"\0"))
    cells = [cell.replace("FOLDER", str(folder)) for cell in CELLS]
    with (
        sync_api.sync_playwright() as playwright,
        browsing.served(tmp_path, cells) as address,
        browsing.opened(playwright, address) as page,
    ):
        printed(page, 0, "session ready", seconds=300)
        chat = run(page, 1).locator(".rekindle-panel")
        images = chat.locator("img")
        chat.locator("input[type=file]").set_input_files(chosen)
        sync_api.expect(images).to_have_count(1)
        chat.dispatch_event("dragover", {"dataTransfer": transfer(page, 2)})
        assert "rekindle-drop" in (chat.get_attribute("class") or "")
        chat.dispatch_event("drop", {"dataTransfer": transfer(page, 2)})
        sync_api.expect(images).to_have_count(2)
        assert "rekindle-drop" not in (chat.get_attribute("class") or "")
        line = chat.get_by_placeholder("Say something")
        line.evaluate(PASTE, transfer(page, 3))
        sync_api.expect(images).to_have_count(3)
        chat.dispatch_event("drop", {"dataTransfer": page.evaluate_handle(LARGE)})
        chat.get_by_text("a file of 6,291,457 bytes").wait_for()
        sync_api.expect(images).to_have_count(3)
        chat.locator("input[type=file]").set_input_files(largest)
        sync_api.expect(images).to_have_count(4)
        page.screenshot(path=SHOTS / "jupyterlab" / "chat-pictures-attached.png")
        line.fill("What do you see?")
        line.press("Enter")
        chat.locator("[data-said='user'] img").nth(2).wait_for()
        chat.get_by_text("cut at 8 tokens").first.wait_for()
        assert images.nth(0).evaluate("one => one.naturalWidth") == 96, "it is drawn"
        assert chat.get_by_text("for the next message").count() == 0
        page.screenshot(path=SHOTS / "jupyterlab" / "chat-pictures.png")
        text_alone(page)


def text_alone(page: Any) -> None:
    chat = run(page, 2).locator(".rekindle-panel")
    chat.get_by_placeholder("Say something").wait_for()
    assert chat.locator("input[type=file]").count() == 0
    chat.dispatch_event("drop", {"dataTransfer": transfer(page, 2)})
    chat.get_by_text("reads text alone").wait_for()


def transfer(page: Any, seed: int) -> Any:
    uri = seeing.uri(seeing.noise(seed, 64, 64))
    return page.evaluate_handle(TRANSFER, ["plot.png", "image/png", uri.partition(",")[2]])
