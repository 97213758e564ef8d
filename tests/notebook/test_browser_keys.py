"""Typing into views of a notebook that is far away: a proxy delays each byte between the browser and its server."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import browsing
from helpers.browsing import printed, run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
sync_api = pytest.importorskip("playwright.sync_api")

DELAY = 0.08  # seconds each way, as of a Hub in another country
KEYS = (15, 40, 120)  # milliseconds between keys
CELLS = (
    'import rekindle\nsession = await rekindle.open("tiny", max_requests=4, max_tokens_per_step=64)\n'
    'ready = await session.generate("Once", max_tokens=4)\nprint("session ready")',
    "chat = session.view.chat(max_tokens=2, ignore_eos=True)\nchat",
    'await session.generate("Once upon a time, " * 40, max_tokens=2)\nsession.view.tree()',
    'print("said:", [one["content"] for one in chat.messages if one["role"] == "user"])',
)


@contextlib.contextmanager
def delaying(address: str, seconds: float) -> Iterator[str]:
    """The address of a proxy that passes all bytes on after so many seconds, in both directions."""
    port = urllib.parse.urlsplit(address).port
    sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def started(run: Callable[..., None], *arguments: Any) -> None:
        threads.append(threading.Thread(target=run, args=arguments))
        threads[-1].start()

    def read(source: socket.socket, line: queue.Queue[tuple[float, bytes]]) -> None:
        data = b"..."
        while data:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            line.put((time.monotonic() + seconds, data))

    def write(target: socket.socket, line: queue.Queue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = line.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)

    def accept(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = server.accept()
                sockets.append(here)
                there = socket.create_connection(("127.0.0.1", port))
                sockets.append(there)
                for source, target in ((here, there), (there, here)):
                    line: queue.Queue[tuple[float, bytes]] = queue.Queue()
                    started(read, source, line)
                    started(write, target, line)

    server = socket.create_server(("127.0.0.1", 0))
    sockets.append(server)
    started(accept, server)
    try:
        yield urllib.parse.urlsplit(address)._replace(netloc=f"127.0.0.1:{server.getsockname()[1]}").geturl()
    finally:
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(30)
        for one in sockets:
            one.close()


def test_what_is_typed_far_away_arrives_whole(tmp_path: Path) -> None:
    pytest.importorskip("jupyterlab")
    with (
        sync_api.sync_playwright() as playwright,
        browsing.served(tmp_path, CELLS) as near,
        delaying(near, DELAY) as far,
        browsing.opened(playwright, far) as page,
    ):
        printed(page, 0, "session ready", seconds=300)
        texts = messages_arrive(page)
        a_field_that_answers_as_one_types(page)
        printed(page, 3, f"said: {texts}")


def messages_arrive(page: Any) -> list[str]:
    """Each is sent as it was typed, and its field is empty for the next one."""
    chat = run(page, 1).locator(".rekindle-panel")
    line, said = chat.get_by_placeholder("Say something"), chat.locator("[data-said=user]")
    line.click()
    texts = [f"message {number} at {pause} ms a key!" for pause in KEYS for number in range(3)]
    for at, text in enumerate(texts):
        page.keyboard.type(text, delay=KEYS[at // 3])
        page.keyboard.press("Enter")
        said.nth(at).wait_for()
        sync_api.expect(line).to_have_value("")
        assert said.nth(at).inner_text() == text
    for text in ("and two at once", "as one who is in a hurry"):
        page.keyboard.type(text, delay=1)
        page.keyboard.press("Enter")
        texts.append(text)
    said.nth(len(texts) - 1).wait_for()
    sync_api.expect(line).to_have_value("")
    assert said.all_inner_texts() == texts
    return texts


def a_field_that_answers_as_one_types(page: Any) -> None:
    tree = run(page, 2).locator(".rekindle-panel")
    field = tree.get_by_placeholder("What would this prompt hit?")
    field.click()
    text = "Once upon a time, " * 3
    page.keyboard.type(text, delay=5)
    tree.get_by_text("prompt tokens are cached").first.wait_for()
    assert field.input_value() == text
