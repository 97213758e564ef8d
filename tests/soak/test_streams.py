"""Three hundred streams with known texts at once, each of which notes its longest gap, while others storm and leave.

pytest -m soak -s tests/soak/test_streams.py      # ten minutes
pytest -m slow -s tests/soak/test_streams.py      # a minute; -s shows the gaps, without storms and with them
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import rekindle
from helpers import turns
from helpers.loopback import Case, Counts, stream
from helpers.sessions import comes_to_rest, wait_until_idle
from rekindle import Session
from soak.test_http import Attackers
from soak.test_kills import REASONS

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")

STREAMS = 300
SECONDS = float(os.environ.get("REKINDLE_SOAK_SECONDS", "1800")) / 3
STORMS = 4  # attackers; each has up to eight requests with all features at once, and one that is aborted
PATIENCE = 600.0  # seconds for an answer on a busy machine
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 256, "max_requests": STREAMS + 64, "disk_memory": 0, "seed": 0, "quiet": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def many_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8_192)), hard))


def cases_of(session: Session) -> list[Case]:
    """Greedy and drawn, some of which end at a string; none is as long as the context."""
    made = []
    for number in range(30):
        messages = [{"role": "user", "content": f"Tell me of the day {number}" + " and so on" * (number % 5)}]
        options = {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "seed": number}
        body: dict[str, Any] = {"messages": messages, "max_tokens": 60 + number, **options}
        if number % 3 == 0:
            body["stop"] = ["."]
        done = session.chat(messages, **{name: body[name] for name in body if name != "messages"}).result_sync()
        made.append(Case(body, done.text, REASONS[str(done.finish_reason)]))
    return made


class Round:
    """So many streams at once; meanwhile others send requests with all features, have them aborted, and leave."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.seed = port, seed
        self.counts, self.attackers = Counts(), Attackers(port, seed)
        self.over = False

    async def run(self, cases: list[Case], storms: int) -> None:
        async with asyncio.TaskGroup() as others:
            for number in range(storms):
                others.create_task(self.storm())
                others.create_task(self.abort(number))
            async with asyncio.TaskGroup() as streams:
                for number in range(STREAMS):
                    streams.create_task(self.stream(cases[number % len(cases)]))
            self.over = True

    async def stream(self, case: Case) -> None:
        async with asyncio.timeout(PATIENCE):
            taken = False
            while not taken:
                taken = await stream(self.port, case, self.counts)
                await asyncio.sleep(0.0 if taken else 0.1)

    async def storm(self) -> None:
        while not self.over:
            await self.attackers.storm()

    async def abort(self, number: int) -> None:
        draw, sent = random.Random(f"{self.seed} {number}"), 0
        while not self.over:
            name, sent = f"{self.seed}-{number}-{sent}", sent + 1
            async with asyncio.TaskGroup() as group:
                group.create_task(self.aborted(name))
                await asyncio.sleep(draw.choice((0.0, 0.01, 0.1)))
                data = json.dumps({"request_ids": [name]}).encode()
                await self.attackers.post("/abort", data, patience=PATIENCE)

    async def aborted(self, name: str) -> None:
        body = {"messages": [{"role": "user", "content": "One day"}], "max_tokens": 60, "request_id": name}
        said = await self.attackers.post("/v1/chat/completions", json.dumps(body).encode(), patience=PATIENCE)
        self.attackers.note("abort", said)


def said(counts: Counts) -> str:
    gaps = sorted(counts.gaps)
    figures = ", ".join(f"{gaps[int(share * (len(gaps) - 1))]:.2f}" for share in (0.5, 0.9, 0.99, 1.0))
    return f"{counts.most_open} streams at once: gaps of {figures} s (the median, 90 %, 99 %, the longest)"


@pytest.mark.timeout(SECONDS * 2 + 900)
@pytest.mark.parametrize(
    "seconds", [pytest.param(60.0, marks=pytest.mark.slow), pytest.param(SECONDS, marks=pytest.mark.soak)]
)
def test_storms_change_no_stream(tmp_path: Path, seconds: float) -> None:
    with rekindle.open_sync("tiny", cache_dir=str(tmp_path), **OPTIONS) as session:
        cases = cases_of(session)
        seen: Counter[str] = Counter()

        async def rounds() -> None:
            until = asyncio.get_running_loop().time() + seconds
            async with await session.serve() as server:
                number = 0
                while number < 4 or asyncio.get_running_loop().time() < until:
                    storms = STORMS if number % 2 else 0
                    one = Round(server.port, number)
                    with turns.neighbour() as thread:
                        await one.run(cases, storms)
                    await comes_to_rest(server)
                    assert one.counts.finished == STREAMS == len(one.counts.gaps)
                    print(
                        f"{storms} storms, {said(one.counts)}; a thread's turn {thread.longest * 1e3:.0f} ms",
                        flush=True,
                    )
                    seen.update(one.attackers.counts)
                    number += 1

        asyncio.run(rounds())
        print(dict(sorted(seen.items())))
        assert {"storm 200", "abort 499"} <= seen.keys()
        wait_until_idle(session)
        session.check_integrity()
        assert cases_of(session) == cases
