"""JupyterLab in a headless Chromium: a stream is stopped by its button, dashboard and tree are there to be seen."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
sync_api = pytest.importorskip("playwright.sync_api")

ROOT = Path(__file__).parent.parent.parent
SHOTS = Path(os.environ.get("REKINDLE_SCREENSHOTS", ROOT / "build" / "screenshots"))
CELLS = (
    'import rekindle\nsession = await rekindle.open("tiny", max_requests=4, max_tokens_per_step=64)\n'
    'ready = await session.generate("Once", max_tokens=4)\nprint("session ready")',
    "session.watch()",
    'view = session.view.stream("Once upon a time", max_tokens=1000, ignore_eos=True, temperature=1.0)\nview',
    'print("status:", view.handle.status, session.stats().running)',
    'await session.generate("Once upon a time, " * 40, max_tokens=2)\nsession.cache.view()',
)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a notebook in a JupyterLab of its own."""
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), tmp_path / "views.ipynb")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.environ.get("PYTHONPATH") or f"{ROOT / 'toolkit'}{os.pathsep}{ROOT / 'kernels'}",
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1"]
    command += ["--IdentityProvider.token=", "--ServerApp.password=", f"--ServerApp.root_dir={tmp_path}"]
    with (tmp_path / "lab.log").open("w") as log:
        server = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/api", timeout=2).close()
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "lab.log").read_text()
                time.sleep(0.5)
        yield f"{address}/lab/tree/views.ipynb?reset"
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture
def page(lab: str) -> Iterator[Any]:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    SHOTS.mkdir(parents=True, exist_ok=True)
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium: {error}")
        page = browser.new_page(viewport={"width": 1100, "height": 1400})
        page.set_default_timeout(120_000)
        page.goto(lab)
        page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        yield page
        page.screenshot(path=SHOTS / "last.png")
        browser.close()


def run_next(page: Any) -> None:
    page.keyboard.press("Shift+Enter")


def cell(page: Any, index: int) -> Any:
    return page.locator(".jp-Notebook .jp-CodeCell").nth(index)


def test_a_stream_is_stopped_and_views_are_shown(page: Any) -> None:
    page.get_by_text("| Idle").wait_for()  # a cell that is run before its kernel is there is lost
    cell(page, 0).locator(".cm-content").click()
    run_next(page)
    cell(page, 0).locator(".jp-OutputArea-output").get_by_text("session ready").wait_for()
    run_next(page)
    run_next(page)
    stop = cell(page, 2).get_by_role("button", name="Stop")
    stop.wait_for()
    text = cell(page, 2).locator(".jp-OutputArea-output")
    page.wait_for_function("element => element.innerText.length > 150", arg=text.first.element_handle())
    page.screenshot(path=SHOTS / "streaming.png")
    stop.click()
    stop.wait_for(state="detached")
    stopped = text.first.inner_text()
    assert "RequestAborted" in stopped
    page.wait_for_timeout(1000)
    assert text.first.inner_text() == stopped, "the text went on"
    cell(page, 3).locator(".cm-content").click()  # the button took the focus with it
    run_next(page)
    cell(page, 3).get_by_text("status: aborted 0").wait_for()
    assert cell(page, 1).locator("svg rect").count() >= 1
    run_next(page)
    cell(page, 4).get_by_text("Prefix cache").first.wait_for()
    box = cell(page, 4).get_by_placeholder("What would this prompt hit?")
    box.fill("Once upon a time, Once upon a time, " * 20)
    cell(page, 4).get_by_text("prompt tokens are cached").first.wait_for()
    page.screenshot(path=SHOTS / "tree.png")
    cell(page, 1).screenshot(path=SHOTS / "dashboard.png")
