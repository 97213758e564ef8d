"""`python tutorials/source/pictures.py`: pictures of the real views in JupyterLab, in both themes.

Needs playwright and a Chromium, as the browser tests do. Every picture is of a cell's output alone.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[1] / "tests"))

from PIL import Image
from playwright.sync_api import sync_playwright

from helpers import browsing

THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
CELLS = {
    "": 'import rekindle\nsession = await rekindle.open("tiny", max_requests=8, page_size=16)\n'
    'ready = await session.generate("Once", max_tokens=4, logprobs=4)\nawait session.cache.clear()\nprint("ready")',
    "completion": 'await session.generate("Once upon a time", max_tokens=60, temperature=0.9, seed=3, logprobs=4)',
    "dashboard": "session.watch()",
    "work": """import anyio, random
random.seed(1)
story = "Once upon a time there was a small green dragon called Zoe. Zoe lived in a cave near the river. "
async def ask(index):
    await anyio.sleep(random.random() * 0.1)
    await session.generate(story * random.randint(1, 4) + random.choice(["Tom", "Anna", "Then", "One day"]),
                           max_tokens=random.randint(10, 70), temperature=1.0, seed=index, ignore_eos=True)
async with anyio.create_task_group() as group:
    for index in range(28):
        group.start_soon(ask, index)
print("done")""",
    "tree": """await session.cache.clear()
for rest in ("Tom the fox was his friend, and they", "Anna knew him.", "Tom the fox was hungry, so he went to the river"):
    await session.generate(story * 2 + rest, max_tokens=40, seed=1)
session.view.tree()""",
    "chat": 'chat = session.view.chat(max_tokens=40)\nchat.send("Who are you?")\nchat._handle.result_sync()\n'
    'chat.send("Tell me a story about a cat.")\nchat._handle.result_sync()\nchat',
}


def main() -> None:
    target = FOLDER / "pictures"
    target.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        for theme, name in THEMES.items():
            with (
                tempfile.TemporaryDirectory() as folder,
                browsing.served(Path(folder), list(CELLS.values()), theme=name) as address,
                browsing.opened(playwright, address, width=1000, height=1600, scale=1.5) as page,
            ):
                take(page, theme, target)


def take(page: Any, theme: str, target: Path) -> None:
    index = {name: position for position, name in enumerate(CELLS)}
    browsing.printed(page, 0, "ready", seconds=600)  # its programs may have to be compiled
    browsing.run(page, index["completion"]).locator("span[title]").first.wait_for()
    keep(page, index["completion"], target / f"completion-{theme}.png")
    browsing.run(page, index["dashboard"]).get_by_role("button", name="Close").wait_for()
    browsing.printed(page, index["work"], "done")
    page.wait_for_timeout(700)  # its last picture
    keep(page, index["dashboard"], target / f"dashboard-{theme}.png")
    tree = browsing.run(page, index["tree"])
    prompt = tree.get_by_placeholder("What would this prompt hit?")
    prompt.fill("Once upon a time there was a small green dragon called Zoe. Zoe lived in a house.")
    tree.get_by_text("prompt tokens are cached").wait_for()
    prompt.press("Home")  # its beginning is in sight
    keep(page, index["tree"], target / f"tree-{theme}.png")
    chat = browsing.run(page, index["chat"]).locator(".jp-OutputArea-output").last
    chat.locator("[data-token='9']").click()
    chat.get_by_label("What could stand here").wait_for()
    chat.get_by_placeholder("what should come there instead").fill(" small blue bird")
    keep(page, index["chat"], target / f"chat-{theme}.png")


def keep(page: Any, index: int, path: Path) -> None:
    """A screenshot of the cell's output, in the few colours that it has."""
    page.mouse.move(0, 0)
    output = browsing.cell(page, index).locator(".jp-OutputArea-output").last  # the first may be a hidden copy
    output.evaluate("(one) => Object.assign(one.style, { padding: '12px', boxSizing: 'border-box' })")
    taken = Image.open(io.BytesIO(output.screenshot())).convert("RGB")
    output.evaluate("(one) => { one.style.padding = ''; }")
    taken.quantize(128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {taken.width}×{taken.height}, {path.stat().st_size // 1024} KiB", flush=True)


if __name__ == "__main__":
    main()
