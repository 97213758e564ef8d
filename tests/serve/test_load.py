"""Five hundred streams at once over loopback, a third of whose clients leave: nothing wrong, nothing left.

pytest -m slow tests/serve/test_load.py      # a quarter of a minute
pytest -m soak tests/serve/test_load.py      # ten minutes
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import rekindle
from helpers.loopback import Case, Load
from helpers.sessions import listener_of, wait_until_idle
from rekindle import Session

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")

CLIENTS = 500
GROWTH = 64 << 20  # resident bytes that the second half of a load may add: allocators keep some
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_requests": 32, "generation_config": "greedy"}
PROMPTS = ("Once upon a time", "Anna said", "Tom had a red ball.", "Who are you?", "One day", "The dog ran", "Say it")


@pytest.fixture(autouse=True)
def many_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8_192)), hard))


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    options = {**OPTIONS, "precompile": "all", "max_queue": 400}
    with rekindle.open_sync("tiny", cache_dir=str(tmp_path_factory.mktemp("cache")), **options) as made:
        yield made
        wait_until_idle(made)


@pytest.fixture(scope="module")
def cases(session: Session) -> list[Case]:
    """Greedy and drawn, of different lengths, with a shared beginning and without."""
    reasons = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
    made = []
    for number in range(28):
        said = PROMPTS[number % len(PROMPTS)] + (" and so on" * (number % 4))
        options: dict[str, Any] = {"max_tokens": 4 + 3 * (number % 8), "temperature": 0.0}
        if number % 3 == 0:
            options |= {"temperature": 0.9, "seed": number}
        messages = [{"role": "user", "content": said}]
        done = session.chat(messages, **options).result_sync()
        made.append(Case({"messages": messages, **options}, done.text, reasons[str(done.finish_reason)]))
    return made


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "seconds", [pytest.param(15, marks=pytest.mark.slow), pytest.param(600, marks=pytest.mark.soak)]
)
def test_every_answer_is_that_of_the_session_and_nothing_is_left(
    session: Session, cases: list[Case], seconds: int
) -> None:
    """The queue holds 432 of 500 requests, so that some are refused with 429 and come again."""

    async def run() -> tuple[Load, list[int]]:
        resident: list[int] = []
        async with await session.serve(max_queued_tokens=1 << 20) as server:
            load = Load(server.port, cases, CLIENTS)
            running = asyncio.ensure_future(load.run())
            for _ in range(10):
                await asyncio.wait([running], timeout=seconds / 10)
                gc.collect()
                resident.append(psutil.Process().memory_info().rss)
                if running.done():
                    break
            load.stopping.set()
            await running
            for _ in range(200):  # the server may notice a moment later that its last client left
                if not listener_of(server).life.active:
                    break
                await asyncio.sleep(0.05)
            assert not listener_of(server).life.active
            assert listener_of(server).life.queued_tokens == 0
        return load, resident

    compiled = session.stats().compilations
    load, resident = asyncio.run(run())
    counts = load.counts
    print(f"{counts}, {resident[-1] >> 20} MiB")
    assert counts.most_open > 0.9 * CLIENTS
    assert counts.finished > 100 and counts.left > 50 and counts.refused > 0
    assert set(counts.statuses) == {200, 429}
    wait_until_idle(session)
    assert session.stats().compilations == compiled
    half = len(resident) // 2
    assert max(resident[half:]) - max(resident[:half]) < GROWTH, resident


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_signal_amid_a_load_loses_nothing_that_was_promised(cases: list[Case], tmp_path: Path) -> None:
    """Streams that have begun end with [DONE] and the right text; others are refused; the process ends with 0."""
    command = [
        sys.executable, "-m", "rekindle", "serve", "tiny", "--port", "0", "--drain", "120", "--dtype", "float32",
        "--max-model-len", "256", "--max-requests", "32", "--cache-dir", str(tmp_path),
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stderr is not None
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, "the server ended"
                found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)
            port = int(found[1])

            async def run() -> Load:
                load = Load(port, cases, 200, leaving=0.1)
                while True:
                    try:
                        reader, writer = await asyncio.open_connection("127.0.0.1", port)
                        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                        answer = await reader.read()
                        writer.close()
                        if b" 200 " in answer:
                            break
                    except OSError:
                        pass
                    await asyncio.sleep(0.2)
                running = asyncio.ensure_future(load.run())
                while load.counts.finished < 100 and not running.done():
                    await asyncio.wait([running], timeout=0.02)
                load.ending = True
                process.send_signal(signal.SIGTERM)
                await asyncio.wait([running], timeout=0.5)
                load.stopping.set()
                await running
                with pytest.raises(OSError):
                    await asyncio.open_connection("127.0.0.1", port)
                return load

            load = asyncio.run(run())
            print(load.counts)
            assert load.counts.draining > 0
            assert process.wait(60) == 0
        finally:
            process.kill()
