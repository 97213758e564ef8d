"""Fuzzed heads, broken framing and storms of cancellations with every feature, beside streams whose texts are known.

pytest -m soak tests/soak/test_http.py       # half an hour
pytest -m slow tests/soak/test_http.py       # half a minute
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import rekindle
from helpers.loopback import Case, Counts, stream
from helpers.sessions import eventually, wait_until_idle

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")

SECONDS = float(os.environ.get("REKINDLE_SOAK_SECONDS", "1800"))
GROWTH = 96 << 20  # resident bytes that the second half may add
HEADERS = [b"Host", b"Content-Length", b"Transfer-Encoding", b"Connection", b"Expect", b"Upgrade", b"X-Request-Id",
           b"Content-Type", b"Authorization", b"Trailer", b"Cookie", b"\xff", b"a b", b""]  # fmt: skip
VALUES = [b"localhost", b"evil.example", b"0", b"-1", b"99999999999999999999", b"chunked", b"chunked, chunked",
          b"close", b"100-continue", b"websocket", b"application/json", b"\x00", b"\xe9" * 9, b"a" * 3_000, b" ",
          b"keep-alive"]  # fmt: skip
FEATURES: list[dict[str, Any]] = [
    {},
    {"n": 4},
    {"logprobs": True, "top_logprobs": 20},
    {"prompt_logprobs": 5},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"stop": ["a", "e"], "include_stop_str_in_output": True},
    {"logit_bias": {"300": 5}, "bad_words": ["the"]},
    {"cache_salt": "one"},
    {"return_token_ids": True, "ignore_eos": True},
    {"structured_outputs": {"regex": "[a-c]{40}"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}},
    {"messages": [{"role": "user", "content": "so on"}] * 3_000},
]


class Attackers:
    """What strangers do to a port, at random."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.draw, self.counts = port, random.Random(seed), Counter[str]()

    async def send(self, data: bytes, *, patience: float) -> bytes:
        """Send in pieces, read for a while and leave."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        said = b""
        with contextlib.suppress(OSError, TimeoutError):
            try:
                async with asyncio.timeout(patience):
                    while data:
                        size = self.draw.choice((1, 7, 100, 4_096, 1 << 20))
                        writer.write(data[:size])
                        await writer.drain()
                        data = data[size:] if size > 1 or len(data) < 500 else data[500:]
                    while more := await reader.read(65_536):
                        said += more
            finally:
                writer.close()
        return said

    async def heads(self) -> None:
        draw = self.draw
        line = draw.choice((b"GET /v1/models", b"POST /v1/chat/completions", b"PUT /", b"GET /" + b"a" * 70_000, b""))
        lines = [line + draw.choice((b" HTTP/1.1", b" HTTP/1.0", b" HTTP/9", b""))]
        lines += [draw.choice(HEADERS) + b":" + draw.choice(VALUES) for _ in range(draw.choice((0, 1, 5, 40, 400)))]
        ending = draw.choice((b"\r\n\r\n", b"\n\n", b"\r\n", b""))
        said = await self.send(b"\r\n".join(lines) + ending, patience=0.3)
        self.note("heads", said)

    async def framing(self) -> None:
        draw = self.draw
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}).encode()
        chunks = b"".join(
            b"%x%b\r\n%b\r\n" % (draw.choice((len(one), 0xFFFFFFFF, 0)), draw.choice((b"", b";a=b", b";" * 900)), one)
            for one in (body[:9], body[9:])
        )
        trailer = draw.choice((b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0\r\nX: " + b"a" * 90_000, b"", b"-1\r\n\r\n"))
        length = draw.choice((len(body), 0, 1, len(body) + 50, 1 << 40))
        framed = draw.choice((
            b"Transfer-Encoding: chunked\r\n\r\n" + chunks + trailer,
            b"Content-Length: %d\r\n\r\n" % length + body,
            b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % length + chunks + trailer,
            (b"Content-Length: %d\r\n\r\n" % len(body) + body + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 40),
        ))  # fmt: skip
        kind = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.note("framing", await self.send(kind + framed, patience=0.3))

    async def storm(self) -> None:
        """Requests with every feature whose clients leave at any moment."""
        draw, several = self.draw, []
        for _ in range(draw.choice((1, 3, 8))):
            body = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 60}
            body |= draw.choice(FEATURES) | {"stream": draw.random() < 0.6}
            data = json.dumps(body).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            head += b"Content-Length: %d\r\n\r\n" % len(data)
            several.append(self.send(head + data, patience=draw.choice((0.0, 0.02, 0.1, 2.0))))
        for said in await asyncio.gather(*several):
            self.note("storm", said)

    def note(self, what: str, said: bytes) -> None:
        status = said.split(b" ", 2)[1].decode("latin-1") if said.startswith(b"HTTP/1.1 ") else "none"
        self.counts[f"{what} {status}"] += 1
        assert status not in ("500", "502"), said[:500]

    async def run(self, attack: Callable[[], Any], until: float) -> None:
        while asyncio.get_running_loop().time() < until:
            await attack()
            await asyncio.sleep(0.02)


@pytest.mark.timeout(SECONDS * 2 + 600)
@pytest.mark.parametrize(
    "seconds", [pytest.param(30.0, marks=pytest.mark.slow), pytest.param(SECONDS, marks=pytest.mark.soak)]
)
def test_strangers_change_no_answer_and_leave_nothing_behind(tmp_path: Path, seconds: float) -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_requests": 16, "cache_dir": str(tmp_path)}
    process = psutil.Process()
    with rekindle.open_sync("tiny", quiet=True, **options) as session:
        messages = [{"role": "user", "content": "Who are you?"}]
        done = session.chat(messages, max_tokens=40, temperature=0.0).result_sync()
        reason = "length" if str(done.finish_reason) == "length" else "stop"
        case = Case({"messages": messages, "max_tokens": 40, "temperature": 0.0}, done.text, reason)

        async def neighbour(port: int, counts: Counts, until: float) -> None:
            while asyncio.get_running_loop().time() < until:
                if not await stream(port, case, counts):
                    await asyncio.sleep(0.1)

        async def phase(seed: int, length: float) -> tuple[Counts, Counter[str]]:
            async with await session.serve() as server:
                until = asyncio.get_running_loop().time() + length
                attackers, counts = Attackers(server.port, seed), Counts()
                async with asyncio.TaskGroup() as group:
                    for _ in range(2):
                        group.create_task(neighbour(server.port, counts, until))
                    for attack in (attackers.heads, attackers.framing, attackers.storm):
                        group.create_task(attackers.run(attack, until))
                await asyncio.to_thread(eventually, lambda: not server._listener.life.active, 60.0)
                await asyncio.to_thread(eventually, lambda: server._listener.connections.count == 0, 60.0)
                assert server._listener.life.queued_tokens == 0
            return counts, attackers.counts

        resident: list[int] = []
        descriptors: list[int] = []
        for seed in range(4):
            counts, seen = asyncio.run(phase(seed, seconds / 4))
            wait_until_idle(session)
            gc.collect()
            resident.append(process.memory_info().rss)
            descriptors.append(process.num_fds())
            print(f"{counts}; {dict(sorted(seen.items()))}; {resident[-1] >> 20} MiB, {descriptors[-1]} descriptors")
            assert counts.finished > 0 and len({name.split()[0] for name in seen}) == 3
        assert max(resident[2:]) - max(resident[:2]) < GROWTH, resident
        assert descriptors[-1] <= descriptors[0] + 8, descriptors
