"""The first minutes as a film in words: when something new is seen, and the longest wait in which nothing is.

    python tests/bench/first_minutes.py [terminal] [jupyterlab] [marimo] [--shots DIR]

Each place is filmed twice over: on a machine whose caches are empty, and again in a new process. A line gives the
seconds since the command or cell was started and what is new on the screen; a bar that moves counts as seen, and only
its first and last line is printed. `longest silence` is the longest time without any change while something ran.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

COMMANDS = (
    ["generate", "Once upon a time"],
    ["generate", "Once upon a time there was a dragon", "--temperature", "0.8", "--seed", "1"],
)
CELLS = (
    "import rekindle",
    'session = await rekindle.open("tiny")\nsession',
    'done = await session.generate("Once upon a time", max_tokens=64)\ndone',
    'async for delta in session.stream("Tom had a red ball.", temperature=0.8, seed=1, max_tokens=64):\n'
    '    print(delta.text, end="")',
    'prompts = ["Once upon a time", "Anna said", "One day"] * 50\n'
    "answers = await session.generate(prompts, max_tokens=100, ignore_eos=True)\nanswers[0]",
    'reply = await session.chat([{"role": "user", "content": "Who are you?"}])\nreply',
    'await session.save("film")',
    "await session.aclose()",
)
LAB = """() => {
    const cell = document.querySelectorAll('.jp-Notebook .jp-CodeCell')[%d];
    return cell.querySelector('.jp-OutputArea')?.innerText ?? '';
}"""
MARIMO = """() => [...document.querySelectorAll('.output-area, .console-output-area')]
    .map(area => area.innerText).join('\\n')"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
MOVING = re.compile(r"[\u2800-\u28ff]|[\d.,:%]+|[━╸╺█▏▎▍▌▋▊▉#|/\\-]+|\s+")


class Film:
    """What is seen, at most two lines a second; lines that differ in numbers alone, as a bar's, are printed twice."""

    def __init__(self, title: str) -> None:
        print(f"\n{title}")
        self.start = self.last = time.perf_counter()
        self.silence, self.silent_from = 0.0, 0.0
        self._since, self._pending, self._words, self._kept = 0.0, "", "", ""

    def see(self, text: str) -> None:
        now = time.perf_counter()
        self._silent(now)
        if not self._pending:
            self._since = now - self.start
        self._pending += text
        if now - self.start - self._since > 0.5:
            self._print()

    def end(self, at: float | None = None) -> None:
        at = time.perf_counter() if at is None else at
        self._silent(at)
        if self._pending:
            self._print()
        if self._kept:
            print(self._kept)
        seconds = at - self.start
        print(f"  {seconds:5.1f} s  done; longest silence {self.silence:.2f} s, from {self.silent_from:.1f} s on")

    def _silent(self, now: float) -> None:
        """Something is seen; until now nothing was since the last time."""
        if now - self.last > self.silence:
            self.silence, self.silent_from = now - self.last, self.last - self.start
        self.last = now

    def _print(self) -> None:
        shown = ESCAPES.sub("", self._pending).replace("\r\n", "\n").strip("\r")
        line = " ".join(shown.rpartition("\r")[2].split())
        words, self._pending = MOVING.sub("", line), ""
        line = f"  {self._since:5.1f} s  {line if len(line) < 120 else line[:80] + ' … ' + line[-36:]}"
        if words == self._words:
            self._kept = line
            return
        if self._kept:
            print(self._kept)
        print(line)
        self._words, self._kept = words, ""


def terminal(environment: dict[str, str]) -> None:
    """The command line in a terminal of 100 columns."""
    for words in COMMANDS:
        film = Film(f"$ rekindle {' '.join(words)}")
        child, screen = pty.fork()
        if child == 0:
            os.environ.update(environment, COLUMNS="100", TERM="xterm")
            os.execv(sys.executable, [sys.executable, "-m", "rekindle", *words])
        while True:
            if not select.select([screen], [], [], 60)[0]:
                break
            try:
                seen = os.read(screen, 65536)
            except OSError:
                break
            if not seen:
                break
            film.see(seen.decode(errors="replace"))
        os.waitpid(child, 0)
        film.end()


def watched(film: Film, page: Any, look: str, busy: Callable[[], bool]) -> None:
    """See what the JavaScript `look` gives until nothing is busy and it stays the same for half a second."""
    seen, ended = "", 0.0
    while not ended or time.perf_counter() - ended < 0.5:
        now = page.evaluate(look)
        if now != seen:
            film.see(now.removeprefix(seen))
            seen, ended = now, 0.0
        if busy():
            ended = 0.0
        elif not ended:
            ended = time.perf_counter()
        page.wait_for_timeout(50)
    film.end(ended)


def jupyterlab(environment: dict[str, str], shots: Path | None, when: str) -> None:
    from playwright.sync_api import sync_playwright

    from helpers import browsing

    os.environ.update(environment)
    with (
        tempfile.TemporaryDirectory() as folder,
        sync_playwright() as playwright,
        browsing.served(Path(folder), CELLS) as address,
        browsing.opened(playwright, address) as page,
    ):
        for index, source in enumerate(CELLS):
            film = Film(f"In: {source.splitlines()[0]}")
            cell = browsing.run(page, index)
            handle = cell.element_handle()
            prompt = cell.locator(".jp-InputPrompt").first
            watched(film, page, LAB % index, lambda prompt=prompt: "*" in prompt.inner_text())
            if shots is not None:
                shots.mkdir(parents=True, exist_ok=True)
                handle.screenshot(path=shots / f"lab-{when}-{index}.png")


def marimo_source() -> str:
    """The notebook as marimo keeps it: names that a later cell uses are passed on."""
    cells = []
    made: list[str] = []
    for source in CELLS:
        takes = [name for name in made if re.search(rf"\b{name}\b", source)]
        new = [
            name
            for name in ("rekindle", "session", "done", "answers", "reply")
            if re.search(rf"^(import )?{name}\b( =|$)", source, re.M)
        ]
        new = [name for name in new if name not in made]
        body = "".join(f"    {line}\n" for line in source.splitlines())
        marker = "async " if "await " in source or "async for" in source else ""
        returned = "".join(f"{name}, " for name in new).strip()
        cells.append(f"@app.cell\n{marker}def _({', '.join(takes)}):\n{body}    return {returned}\n")
        made += new
    return "import marimo\n\napp = marimo.App()\n\n\n" + "\n\n".join(cells)


@contextmanager
def marimo_server(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    (folder / "film.py").write_text(marimo_source())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "marimo",
        "run",
        "film.py",
        "--headless",
        "--no-token",
        f"--port={port}",
        "--include-code",
    ]
    path = os.pathsep.join([str(ROOT / "toolkit"), str(ROOT / "kernels")])
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": path, **environment}, stdout=log, stderr=log
        )
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def marimo(environment: dict[str, str], shots: Path | None, when: str) -> None:
    """marimo runs all cells by itself as soon as the page is open, so one film shows them all."""
    from playwright.sync_api import sync_playwright

    with (
        tempfile.TemporaryDirectory() as folder,
        sync_playwright() as playwright,
        marimo_server(Path(folder), environment) as address,
    ):
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 1600})
        page.goto(address)
        film = Film(f"marimo: all {len(CELLS)} cells")
        deadline = time.perf_counter() + 120
        watched(
            film,
            page,
            MARIMO,
            lambda: "I am" not in page.evaluate(MARIMO) and time.perf_counter() < deadline,
        )
        if shots is not None:
            shots.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=shots / f"marimo-{when}.png", full_page=True)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", default=["terminal", "jupyterlab", "marimo"])
    parser.add_argument("--shots", type=Path)
    given = parser.parse_args()
    films = {
        "terminal": lambda environment, _: terminal(environment),
        "jupyterlab": lambda environment, when: jupyterlab(environment, given.shots, when),
        "marimo": lambda environment, when: marimo(environment, given.shots, when),
    }
    for place in given.places:
        with tempfile.TemporaryDirectory() as cache:
            environment = {"XDG_CACHE_HOME": cache}
            for when in ("fresh", "again"):
                print(f"\n== {place}, {'no caches' if when == 'fresh' else 'after a restart'}")
                films[place](environment, when)


if __name__ == "__main__":
    main()
