"""A load of streaming chats over loopback: plain sockets, since a client library would be slower than the server."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import random
import time
from collections.abc import Sequence
from typing import Any

SECONDS = 240.0  # for one answer on a busy machine


@dataclasses.dataclass(frozen=True)
class Case:
    """A request, and the answer that the session gives in this process."""

    body: dict[str, Any]
    text: str
    finish_reason: str


class Wrong(AssertionError):
    """An answer that differs from the one in process, or a response that the server does not promise."""


class Cut(Wrong):
    """A stream that ended in the middle of its answer, after this text."""

    def __init__(self, text: str) -> None:
        super().__init__(f"a stream ended after {text!r} without [DONE]")
        self.text = text


@dataclasses.dataclass
class Counts:
    """What became of the requests."""

    finished: int = 0
    left: int = 0  # the client went away
    refused: int = 0  # 429, with Retry-After
    draining: int = 0  # 503, or no connection, after the end has begun
    statuses: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    open: int = 0
    most_open: int = 0
    gaps: list[float] = dataclasses.field(default_factory=list)  # seconds, the longest of each stream that finished

    @property
    def longest_gap(self) -> float:
        return max(self.gaps, default=0.0)


async def stream(port: int, case: Case, counts: Counts, *, leave_after: int | None = None) -> bool:
    """One streaming chat; whether it was taken on. Leaves after so many events, if given, without a word."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    counts.open += 1
    counts.most_open = max(counts.most_open, counts.open)
    try:
        body = json.dumps({**case.body, "stream": True}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split(b" ", 2)[1])
        counts.statuses[status] += 1
        if status != 200:
            answer = await reader.read()
            if status == 429 and b"retry-after:" in head:
                counts.refused += 1
            elif status == 503:
                counts.draining += 1
            else:
                raise Wrong(f"status {status}: {answer[:300]!r}")
            return False
        text, reason, events, done = "", None, 0, False
        last, gap = time.monotonic(), 0.0
        while True:
            try:
                line = await reader.readline()
            except (ConnectionResetError, asyncio.IncompleteReadError):
                line = b""
            if not line.endswith(b"\n"):
                break
            if not line.startswith(b"data: "):
                continue
            events += 1
            now = time.monotonic()
            if events > 1:
                gap = max(gap, now - last)
            last = now
            if events == leave_after:
                counts.left += 1
                return True
            if line.startswith(b"data: [DONE]"):
                done = True
                break
            event = json.loads(line[6:])
            if "error" in event:
                raise Wrong(f"a stream ended with {event}")
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
        if not done:
            raise Cut(text)
        if (text, reason) != (case.text, case.finish_reason):
            raise Wrong(f"{case.body}: {text!r} ({reason}), in process {case.text!r} ({case.finish_reason})")
        counts.finished += 1
        counts.gaps.append(gap)
        return True
    finally:
        counts.open -= 1
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class Load:
    """So many clients at once, until `stopping` is set; each of them asks, reads or leaves, and asks again."""

    def __init__(self, port: int, cases: Sequence[Case], clients: int, *, seed: int = 0, leaving: float = 0.3) -> None:
        self._port, self._cases, self._clients, self._leaving = port, cases, clients, leaving
        self._random = random.Random(seed)
        self.counts = Counts()
        self.stopping = asyncio.Event()
        self.ending = False  # the server was told to end: refusals are right, and broken promises are not

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(self._client())

    async def _client(self) -> None:
        while not self.stopping.is_set():
            case, leave = self._random.choice(self._cases), None
            if self._random.random() < self._leaving:
                leave = self._random.choice((1, 2, 3, 8, 20))
            try:
                async with asyncio.timeout(SECONDS):
                    taken = await stream(self._port, case, self.counts, leave_after=leave)
            except (ConnectionRefusedError, ConnectionResetError, asyncio.IncompleteReadError):
                # Before a response has begun nothing was promised.
                if not self.ending:
                    raise
                self.counts.draining += 1
                return
            if not taken:
                await asyncio.sleep(self._random.uniform(0.05, 0.5))
