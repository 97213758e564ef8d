"""Clients that leave at any byte, close half of a connection, read or write slowly, while streams with known texts run.

pytest -m soak -s tests/soak/test_drops.py                                # 10,000 at a session, and at a fleet
pytest -m slow -s tests/soak/test_drops.py                                # 200
REKINDLE_DROPS=2000 pytest -m slow -s tests/soak/test_drops.py
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import rekindle
from helpers.fleets import local_fleet
from helpers.loopback import Case, Counts, stream
from helpers.sessions import comes_to_rest, wait_until_idle
from rekindle import Fleet, Session
from rekindle._src.structured import grammar
from soak.test_http import FEATURES, live_bytes

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")

DROPS = int(os.environ.get("REKINDLE_DROPS", "0"))
LEAST, MANY = 200, 10_000
AT_ONCE, NEIGHBOURS = 12, 2
PATIENCE = 240.0  # seconds for an answer on a busy machine
GROWTH = 64 << 20  # live bytes that the second half may add
PROGRAM = 6 << 20  # and these for each program that is compiled then: few requests need it
MESSAGES = [{"role": "user", "content": "Once upon a time"}]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 256, "max_requests": 16, "host_memory": 1 << 24, "quiet": True, "seed": 0,
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 24},
    "/v1/completions": {"prompt": "One day a dog", "max_tokens": 24},
    "/v1/responses": {"input": "Who are you?", "max_output_tokens": 24},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 24},
    "/v1/embeddings": {"input": ["a cat", "a dog", "a house " * 20]},
    "/tokenize": {"prompt": "so on " * 500},
}
STREAMED = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}


class Drops:
    """Requests that are drawn, and the ways in which their clients leave."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.draw, self.counts = port, random.Random(seed), Counter[str]()
        self.ways = (
            self.leaves_while_sending, self.leaves_while_sending, self.leaves_while_reading,
            self.leaves_while_reading, self.closes_half, self.closes_half_too_early, self.reads_slowly,
            self.writes_slowly, self.stays, self.sends_ahead_and_leaves,
        )  # fmt: skip

    def request(self) -> bytes:
        """A whole request, with any feature."""
        path = self.draw.choice(list(BODIES))
        body = dict(BODIES[path])
        if path == "/v1/chat/completions":
            body |= self.draw.choice(FEATURES)
        if path in STREAMED and self.draw.random() < 0.6:
            body["stream"] = True
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data

    async def one(self) -> None:
        """One request whose client leaves in a way that is drawn."""
        way = self.draw.choice(self.ways)
        small = way == self.reads_slowly
        connection = socket.socket()
        if small:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 10 if small else 1 << 16)
        status = "none"
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                said = await way(reader, writer)
            if said.startswith(b"HTTP/1.1 "):
                status = said.split(b" ", 2)[1].decode("latin-1")
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self.counts[f"{way.__name__} {status}"] += 1
        assert status in ("none", "200", "400", "408", "429"), said[:500]

    def vanish(self, writer: asyncio.StreamWriter) -> None:
        """Leave with a reset, or by closing as usual."""
        if self.draw.random() < 0.5:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def leaves_while_sending(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        data = self.request()
        writer.write(data[: self.draw.randrange(len(data))])
        await writer.drain()
        await asyncio.sleep(self.draw.choice((0.0, 0.0, 0.01)))
        self.vanish(writer)
        return b""

    async def leaves_while_reading(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(self.request())
        await writer.drain()
        said = b""
        most = self.draw.choice((1, 12, 100, 1_000))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.draw.choice((0.0, 0.01, 0.1, 1.0))):
                while len(said) < most and (piece := await reader.read(most - len(said))):
                    said += piece
        self.vanish(writer)
        return said

    async def closes_half(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Send all and say so. The answer may come after interim ones, by which the server tells this from leaving."""
        writer.write(self.request())
        await writer.drain()
        writer.write_eof()
        said = await reader.read()
        while said.startswith(b"HTTP/1.1 100 "):
            said = said.partition(b"\r\n\r\n")[2]
        return said

    async def closes_half_too_early(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        data = self.request()
        writer.write(data[: self.draw.randrange(len(data))])
        await writer.drain()
        writer.write_eof()
        return await reader.read()

    async def reads_slowly(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(self.request())
        await writer.drain()
        said, most = b"", self.draw.choice((50, 500, 5_000))
        while len(said) < most and (piece := await reader.read(self.draw.choice((1, 16, 200)))):
            said += piece
            await asyncio.sleep(0.01)
        self.vanish(writer)
        return said

    async def writes_slowly(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        data = self.request()
        cuts = sorted(self.draw.sample(range(1, len(data)), min(40, len(data) - 1)))
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            writer.write(data[start:end])
            await writer.drain()
            await asyncio.sleep(0.005)
        return await reader.read()

    async def stays(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(self.request())
        await writer.drain()
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 "), said[:100]
        return said

    async def sends_ahead_and_leaves(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Send several requests before an answer to the first one is read."""
        data = b"".join(self.request().replace(b"Connection: close\r\n", b"") for _ in range(3))
        writer.write(data[: self.draw.randrange(1, len(data) + 1)])
        await writer.drain()
        said = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                said = await reader.read(self.draw.choice((1, 100, 4_000)))
        self.vanish(writer)
        return said


@contextlib.contextmanager
def serving(kind: str, folder: Path) -> Iterator[tuple[Session | Fleet, list[Session]]]:
    """Open a session, or a fleet of two that live in this process; and the sessions that do the work."""
    if kind == "session":
        with rekindle.open_sync("tiny", cache_dir=str(folder), **OPTIONS) as session:
            yield session, [session]
        return
    with local_fleet(lambda: rekindle.open_sync("tiny", cache_dir=str(folder), **OPTIONS), replicas=2) as (made, both):
        yield made, [one.session for one in both if one.session is not None]


@pytest.mark.parametrize(
    "requests",
    [pytest.param(LEAST, marks=pytest.mark.slow, id="some"), pytest.param(MANY, marks=pytest.mark.soak, id="many")],
)
@pytest.mark.parametrize("kind", ["session", "fleet"])
@pytest.mark.timeout(7200)
def test_clients_that_leave_at_any_byte_change_no_answer_and_leave_nothing_behind(
    kind: str, requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "KEPT", 16)
    for name in ("uvicorn.error", "rekindle.server"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.ERROR)
    count, process = DROPS or requests, psutil.Process()
    with serving(kind, tmp_path) as (served, sessions):
        question = [{"role": "user", "content": "Who are you?"}]
        done = served.chat(question, max_tokens=40, temperature=0.0).result_sync()
        reason = "length" if str(done.finish_reason) == "length" else "stop"
        case = Case({"messages": question, "max_tokens": 40, "temperature": 0.0}, done.text, reason)

        async def part(number: int) -> tuple[Counts, Counter[str]]:
            counts, over = Counts(), asyncio.Event()
            async with await served.serve() as server:
                drops, left = Drops(server.port, number), count // 4

                async def neighbour() -> None:
                    while not over.is_set():
                        if not await stream(server.port, case, counts):
                            await asyncio.sleep(0.1)

                async def stranger() -> None:
                    nonlocal left
                    while left > 0:
                        left -= 1
                        await drops.one()

                async with asyncio.TaskGroup() as group:
                    for _ in range(NEIGHBOURS):
                        group.create_task(neighbour())
                    async with asyncio.TaskGroup() as strangers:
                        for _ in range(AT_ONCE):
                            strangers.create_task(stranger())
                    over.set()
                await comes_to_rest(server)
            return counts, drops.counts

        live: list[int] = []
        programs: list[int] = []
        descriptors: list[int] = []
        for number in range(4):
            counts, seen = asyncio.run(part(number))
            for session in sessions:
                wait_until_idle(session)
                session.check_integrity()
            gc.collect()
            live.append(live_bytes())
            programs.append(sum(session.stats().compilations for session in sessions))
            descriptors.append(process.num_fds())
            held = (
                f"{live[-1] >> 20} MiB live, {process.memory_info().rss >> 20} resident, "
                f"{descriptors[-1]} descriptors, {programs[-1]} programs"
            )
            said = f"{counts.finished} streams of others, at most {counts.longest_gap:.2f} s between two events"
            print(f"{count // 4} requests: {dict(sorted(seen.items()))}; {said}; {held}", flush=True)
            assert counts.finished > 0
            for way in ("stays", "writes_slowly", "closes_half"):
                assert seen[f"{way} none"] == 0, f"{way}: no answer"
        late = max(programs[-1] - programs[1], 0)
        assert max(live[2:]) - max(live[:2]) < GROWTH + late * PROGRAM, (live, programs)
        assert descriptors[-1] <= descriptors[0] + 8, descriptors
