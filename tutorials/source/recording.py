"""`python tutorials/source/recording.py MODEL.gguf`: the recording of README, of a real session, in both themes.

An answer streams, one of its tokens is replaced by another candidate of the model, the kernel is restarted, and the
conversation is back. Frames are screenshots of JupyterLab with the times at which they were taken; where nothing moves
for longer than `PAUSE`, the wait is cut to it. Needs playwright and a Chromium, as the browser tests do.
"""

from __future__ import annotations

import io
import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[1] / "tests"))

from PIL import Image
from playwright.sync_api import sync_playwright

from helpers import browsing

THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CELLS = (
    f'import rekindle\n\nmodel = "{FILE}"\nsession = await rekindle.open(model, quiet=True)',
    "session.view.chat(max_tokens=40, seed=3)",
    'session.view.chat(restore="auto")',
)
QUESTION = "What is a river?"
TOKEN = 4  # of the answer, which has likely alternatives
PAUSE = 0.9  # seconds that a picture without changes may last
LONGEST = 9.0  # seconds of the whole
MOST = 500_000  # bytes of a file
WIDTH, HEIGHT, SCALE = 700, 470, 1.25


class Film:
    """Screenshots and the times at which they were taken."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.frames: list[tuple[float, Image.Image]] = []

    def shot(self) -> None:
        taken = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
        self.frames.append((time.monotonic(), taken))

    def until(self, done: Callable[[], bool], seconds: float = 60) -> None:
        """Take pictures until something has happened."""
        ends = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < ends, "it did not happen"
            self.shot()
        self.shot()

    def rest(self, seconds: float) -> None:
        """Let the last picture stay."""
        self.shot()
        self.page.wait_for_timeout(1000 * seconds)
        self.shot()

    def write(self, path: Path) -> None:
        """Write the pictures that differ, as an animated WebP."""
        kept = [self.frames[0]]
        for at, frame in self.frames[1:]:
            if frame.tobytes() != kept[-1][1].tobytes():
                kept.append((at, frame))
        times = [at for at, _ in kept] + [self.frames[-1][0]]
        lasting = [min(after - at, PAUSE) for at, after in itertools.pairwise(times)]
        scale = min(1.0, (LONGEST - 1.2) / sum(lasting))
        durations = [max(40, round(1000 * scale * one)) for one in lasting[:-1]] + [2000]
        images = [frame for _, frame in kept]
        for quality in (70, 55, 40, 25):
            images[0].save(
                path,
                save_all=True,
                append_images=images[1:],
                duration=durations,
                loop=0,
                quality=quality,
                method=6,
                minimize_size=True,
            )
            if path.stat().st_size <= MOST:
                break
        size = path.stat().st_size
        print(f"{path.name}: {len(images)} pictures, {sum(durations) / 1000:.1f} s, {size // 1000} kB", flush=True)
        assert size <= MOST


def main() -> None:
    model = Path(sys.argv[1]).resolve()
    with sync_playwright() as playwright:
        for theme, name in THEMES.items():
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / FILE).symlink_to(model)
                with (
                    browsing.served(Path(folder), CELLS, theme=name) as address,
                    browsing.opened(playwright, address, width=WIDTH, height=HEIGHT, scale=SCALE) as page,
                ):
                    bare(page)
                    film = Film(page)
                    act(page, film)
                    film.write(FOLDER / "pictures" / f"session-{theme}.webp")


def bare(page: Any) -> None:
    """Hide all of JupyterLab but the notebook."""
    page.keyboard.press("Control+b")
    page.add_style_tag(
        content=".jp-NotebookPanel-toolbar, #jp-top-panel, #jp-menu-panel, #jp-bottom-panel, .jp-SideBar,"
        ".lm-TabBar, .jp-Notebook-footer { display: none !important }"
        "#jp-main-content-panel, #jp-main-dock-panel, .jp-NotebookPanel, .jp-WindowedPanel-outer"
        "{ top: 0 !important; left: 0 !important; width: 100% !important; height: 100vh !important }"
    )


def act(page: Any, film: Film) -> None:
    browsing.run(page, 0)
    done(page, 0)
    chat = browsing.run(page, 1).locator(".rekindle-panel").last
    line = chat.get_by_placeholder("Say something")
    line.wait_for()
    chat.evaluate("one => one.scrollIntoView({block: 'end'})")
    film.rest(0.4)
    line.fill(QUESTION)
    film.rest(0.3)
    line.press("Enter")
    film.until(lambda: "tokens/s" in chat.inner_text() or "· cut at" in chat.inner_text())
    film.rest(0.6)
    chat.locator(f"[data-token='{TOKEN}']").click()
    chat.get_by_label("What could stand here").wait_for()
    film.rest(0.8)
    chat.get_by_label("What could stand here").get_by_text("natural").click()
    film.rest(0.6)
    chat.locator(".rekindle-fork").get_by_role("button", name="Fork").click()
    film.until(lambda: chat.locator(".rekindle-fork").count() == 0)
    film.until(lambda: "tokens/s" in chat.inner_text())
    film.rest(0.6)
    browsing.cell(page, 0).locator(".jp-InputPrompt").first.click()  # out of the chat's field
    page.keyboard.press("Escape")
    page.keyboard.press("0")
    page.keyboard.press("0")
    page.locator("dialog.jp-Dialog button.jp-mod-accept").click()
    film.until(lambda: "rekindle-gone" in (chat.get_attribute("class") or ""))
    film.rest(0.6)
    browsing.run(page, 0)
    film.until(lambda: finished(page, 0))
    again = browsing.run(page, 2).locator(".rekindle-panel").last
    film.until(lambda: again.count() > 0 and QUESTION in again.inner_text())
    again.evaluate("one => one.scrollIntoView({block: 'end'})")
    film.rest(0.5)


def finished(page: Any, index: int) -> bool:
    return "*" not in browsing.cell(page, index).locator(".jp-InputPrompt").first.inner_text()


def done(page: Any, index: int) -> None:
    while not finished(page, index):
        page.wait_for_timeout(100)


if __name__ == "__main__":
    main()
