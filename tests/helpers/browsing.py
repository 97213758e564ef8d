"""A notebook in a server of its own, and a headless Chromium that looks at it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
SHOTS = Path(os.environ.get("REKINDLE_SCREENSHOTS", ROOT / "build" / "screenshots"))
NAME = "views.ipynb"
# What a notebook's address is in each application.
APPLICATIONS = {"jupyterlab": "lab/tree", "notebook": "notebooks"}


@contextmanager
def served(folder: Path, cells: Sequence[str], *, application: str = "jupyterlab", theme: str = "") -> Iterator[str]:
    """The address of a notebook with these cells; it lies in `folder`."""
    code = [nbformat.v4.new_code_cell(source) for source in cells]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=code, metadata={"kernelspec": kernel}), folder / NAME)
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme} if theme else {}))
    (settings / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false"})
    )  # it asks, over cells
    environment = os.environ | {
        "PYTHONPATH": os.environ.get("PYTHONPATH") or f"{ROOT / 'toolkit'}{os.pathsep}{ROOT / 'kernels'}",
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
    }
    command = [sys.executable, "-m", application, "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += ["--IdentityProvider.token=", "--ServerApp.password=", f"--ServerApp.root_dir={folder}"]
    with running(command, folder, environment, health="/api") as address:
        yield f"{address}/{APPLICATIONS[application]}/{NAME}?reset"


@contextmanager
def running(command: Sequence[str], folder: Path, environment: Mapping[str, str], *, health: str) -> Iterator[str]:
    """Run a server's command in `folder`, on a free port; gives its address once it answers at the path `health`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, f"--port={port}"], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}{health}", timeout=2).close()
                break
            except OSError:
                assert server.poll() is None, (folder / "server.log").read_text()
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(60)  # it waits for its kernels
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@contextmanager
def blank_page(playwright: Any, *, width: int = 1100, height: int = 1400, scale: float = 1) -> Iterator[Any]:
    """Open an empty page of a Chromium: the system's or playwright's. Skips the test where there is none."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None and not Path(playwright.chromium.executable_path).exists():
        pytest.skip("no Chromium: install one, or run playwright install chromium")
    browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    try:
        page = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=scale)
        page.set_default_timeout(120_000)
        yield page
    finally:
        browser.close()


@contextmanager
def opened(playwright: Any, address: str, *, width: int = 1100, height: int = 1400, scale: float = 1) -> Iterator[Any]:
    """The page, as soon as the notebook is drawn and its kernel idle."""
    with blank_page(playwright, width=width, height=height, scale=scale) as page:
        page.goto(address)
        page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        kernels = urllib.parse.urljoin(address, "/api/kernels")
        for _ in range(240):
            with suppress(OSError), urllib.request.urlopen(kernels, timeout=10) as answer:
                if any(kernel["execution_state"] == "idle" for kernel in json.load(answer)):
                    break
            time.sleep(0.5)
        yield page


def cell(page: Any, index: int) -> Any:
    return page.locator(".jp-Notebook .jp-CodeCell").nth(index)


def run(page: Any, index: int) -> Any:
    """Run a cell; gives it, while it may still be running."""
    found = cell(page, index)
    prompt = found.locator(".jp-InputPrompt").first
    before = prompt.inner_text()
    for _ in range(5):  # a cell that is run before the page has connected to its kernel is lost
        found.locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        for _ in range(50):
            if prompt.inner_text() != before:
                return found
            page.wait_for_timeout(100)
    raise AssertionError(f"cell {index} does not run")


def printed(page: Any, index: int, words: str, *, seconds: float = 120) -> None:
    """Run a cell and wait until it has printed these words; its source may contain them too."""
    output = run(page, index).locator(".jp-OutputArea-output")
    output.get_by_text(words).first.wait_for(timeout=seconds * 1000)


def outputs(folder: Path, index: int) -> list[Any]:
    """Return a cell's saved outputs, by kind."""
    saved = nbformat.read(folder / NAME, as_version=4)
    return [output.get("data", {}) for output in saved.cells[index].outputs]
