"""Processes that are killed while streams run: clients that ask again get the texts that they would have got.

pytest -m soak tests/soak/test_kills.py      # ten minutes each
pytest -m slow tests/soak/test_kills.py      # half a minute each
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import rekindle
from helpers.loopback import Case, Counts, Cut, stream
from helpers.sessions import eventually
from soak.test_http import Attackers

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")

SECONDS = float(os.environ.get("REKINDLE_SOAK_SECONDS", "1800")) / 3
ANSWERS = 20
CLIENTS = 6
LONG = [pytest.param(30.0, marks=pytest.mark.slow), pytest.param(SECONDS, marks=pytest.mark.soak)]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 256, "max_requests": 8, "max_tokens_per_step": 128, "deterministic": True,
}  # fmt: skip
ARGUMENTS = ["--dtype", "float32", "--max-model-len", "256", "--max-requests", "8", "--max-tokens-per-step", "128",
             "--deterministic"]  # fmt: skip
REASONS = {"eos": "stop", "grammar": "stop", "stop": "stop", "length": "length", "context": "length"}


def cases_of(session: Any) -> list[Case]:
    """Greedy, drawn, with an end of their own and with a grammar."""
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 0.0, "stop": ["."]},
        {"temperature": 0.8, "seed": 3, "regex": "[a-c]{30}"},
    ]
    made = []
    for number in range(8):
        messages = [{"role": "user", "content": f"Tell me of the day {number}"}]
        given = {"max_tokens": 60, **options[number % len(options)]}
        done = session.chat(messages, **given).result_sync()
        body = {name: value for name, value in given.items() if name != "regex"}
        if "regex" in given:
            body["structured_outputs"] = {"regex": given["regex"]}
        made.append(Case({"messages": messages, **body}, done.text, REASONS[str(done.finish_reason)]))
    return made


class Clients:
    """Clients that ask again when their stream is cut; whatever they have read by then is right."""

    def __init__(self, port: int, cases: list[Case], seed: int, *, cuts: bool) -> None:
        self.port, self.cases, self.cuts = port, cases, cuts
        self.draw, self.counts, self.outcomes = random.Random(seed), Counts(), Counter[str]()
        self.over = False

    async def client(self) -> None:
        while not self.over:
            case = self.draw.choice(self.cases)
            try:
                async with asyncio.timeout(300):
                    if not await stream(self.port, case, self.counts):
                        self.outcomes["refused"] += 1
                        await asyncio.sleep(0.1)
            except Cut as cut:
                if not (self.cuts and case.text.startswith(cut.text)):
                    raise
                self.outcomes["cut"] += 1
            except (ConnectionError, asyncio.IncompleteReadError):
                assert self.cuts, "there is a server all the time"
                self.outcomes["no answer"] += 1
                await asyncio.sleep(0.1)

    async def run(self, seconds: float, strike: Callable[[float], Awaitable[None]], *others: Any) -> None:
        until = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self.client())
            for other in others:
                group.create_task(other(until))
            try:
                await strike(until)
            finally:
                self.over = True


@pytest.mark.timeout(SECONDS * 2 + 600)
@pytest.mark.parametrize("seconds", LONG)
def test_a_server_that_is_killed_comes_back_with_the_same_answers(tmp_path: Path, seconds: float) -> None:
    """Strangers whose requests are cancelled and whose grammars are being compiled are there when it is killed."""
    with rekindle.open_sync("tiny", quiet=True, cache_dir=str(tmp_path), **OPTIONS) as session:
        cases = cases_of(session)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "rekindle", "serve", "tiny", "--port", str(port), *ARGUMENTS]
    command += ["--cache-dir", str(tmp_path), "--drain", "60"]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)

    process = start()
    clients, attackers, draw = Clients(port, cases, 0, cuts=True), Attackers(port, 1), random.Random(2)
    children: set[psutil.Process] = set()
    lives: list[int] = []  # answers of each

    async def until_answers(count: int) -> None:
        """Wait for so many more of them; kills that come sooner would leave no time for any."""
        wanted = clients.counts.finished + count
        async with asyncio.timeout(300):
            while clients.counts.finished < wanted:
                assert process.poll() is None, "it ended by itself"
                await asyncio.sleep(0.05)

    async def kill(until: float) -> None:
        nonlocal process
        while asyncio.get_running_loop().time() < until:
            before = clients.counts.finished
            await until_answers(3)
            await asyncio.sleep(draw.uniform(0.0, 4.0))
            children.update(psutil.Process(process.pid).children(recursive=True))
            process.kill()
            process.wait()
            lives.append(clients.counts.finished - before)
            process = start()
        await until_answers(CLIENTS + 1)  # each may still be reading one of the process that was killed

    def strangers(attack: Callable[[Attackers], Any]) -> Callable[[float], Awaitable[None]]:
        async def run(until: float) -> None:
            while asyncio.get_running_loop().time() < until:
                with suppress(OSError):
                    await attack(attackers)
                await asyncio.sleep(0.2)

        return run

    try:
        asyncio.run(clients.run(seconds, kill, strangers(Attackers.storm), strangers(Attackers.schemas)))
        print(f"{len(lives)} kills, answers of each life: {lives}; {clients.outcomes}; {dict(attackers.counts)}")
        assert len(lives) > 1 and clients.outcomes["cut"] > 0
        eventually(lambda: not [one for one in children if one.is_running()], 30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
    finally:
        process.kill()
        process.wait()
    with rekindle.open_sync("tiny", quiet=True, cache_dir=str(tmp_path), **OPTIONS) as session:
        assert cases_of(session) == cases
        session.check_integrity()


@pytest.mark.timeout(SECONDS * 2 + 600)
@pytest.mark.parametrize("seconds", LONG)
@pytest.mark.filterwarnings("ignore")
def test_replicas_that_are_killed_cut_no_stream(tmp_path: Path, seconds: float) -> None:
    """What a client over HTTP sees of the death of a replica is a pause."""
    pytest.importorskip("ray", reason="fleets need the extra `ray`")
    with rekindle.open_sync("tiny", quiet=True, cache_dir=str(tmp_path), **OPTIONS) as session:
        cases = cases_of(session)
    draw, deaths = random.Random(3), 0
    with rekindle.fleet("tiny", replicas=2, cache_dir=str(tmp_path), **OPTIONS).result_sync() as fleet:
        eventually(lambda: fleet.stats().ready == 2, 120)
        server = fleet.serve().result_sync()
        clients = Clients(server.port, cases, 4, cuts=False)

        async def kill(until: float) -> None:
            nonlocal deaths
            clock = asyncio.get_running_loop().time
            # On busy cores a replica is a while in coming back, so that half a minute may see few answers.
            while clock() < until or (clients.counts.finished <= ANSWERS and clock() < until + 120):
                await asyncio.sleep(draw.uniform(1.0, 4.0))
                stats = await asyncio.to_thread(fleet.stats)
                alive = [one for one in stats.replicas if one.state == "ready"]
                if len(alive) == 2 or (alive and draw.random() < 0.2):  # rarely there is none for a while
                    with suppress(ProcessLookupError):  # it died of an earlier signal, and that is not known yet
                        os.kill(draw.choice(alive).pid, draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)))
                        deaths += 1

        asyncio.run(clients.run(seconds, kill))
        stats = fleet.stats()
        print(f"{deaths} deaths, {stats.moved} requests moved; {clients.counts}; {clients.outcomes}")
        assert deaths >= 3 and stats.moved > 0 and clients.counts.finished > ANSWERS
        assert set(clients.counts.statuses) == {200} and not fleet.closed
        server.close()
