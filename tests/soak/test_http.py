"""Strangers at a server's port, while streams with known texts run.

Fuzzed heads, broken framing, storms of cancellations with every feature, schemas and grammars by reference, and bodies
that are too deep, too wide or of the wrong kind.

pytest -m soak tests/soak/test_http.py       # half an hour
pytest -m slow tests/soak/test_http.py       # half a minute
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import json
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import rekindle
from helpers.loopback import Case, Counts, stream
from helpers.sessions import comes_to_rest, wait_until_idle
from rekindle._src.structured import grammar

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")

SECONDS = float(os.environ.get("REKINDLE_SOAK_SECONDS", "1800"))
GROWTH = 96 << 20  # live bytes that the second half may add
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
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize",
         "/detokenize", "/abort", "/v1/messages/count_tokens", "/v1/decisions", "/v1/rerank"]  # fmt: skip
LEVELS = (1, 2, 5, 20, 100, 400, 499, 501, 1_500, 5_000)


def schema_by_reference(draw: random.Random) -> dict[str, Any]:
    """Definitions that refer to each other: mostly chains, some of which lead back, or nowhere."""
    count = draw.choice(LEVELS)
    kinds = draw.sample(["items", "property", "anyOf", "allOf", "bare", "pattern"], draw.choice((1, 1, 2, 6)))

    def definition(index: int) -> Any:
        other = index + 1 if draw.random() < 0.98 else draw.randrange(count + 2)
        ref = {"$ref": f"#/$defs/d{other}"}
        match draw.choice(kinds):
            case "items":
                return {"type": "array", "items": ref, "maxItems": 2}
            case "property":
                return {"type": "object", "properties": {"a": ref}, "additionalProperties": False}
            case "anyOf":
                return {"anyOf": [{"type": "null"}, ref]}
            case "allOf":
                return {"allOf": [ref, {"type": ["array", "object", "null"]}]}
            case "pattern":
                return {"anyOf": [{"type": "string", "pattern": f"a{index % 7}.*b{{1,{draw.choice((2, 50))}}}"}, ref]}
        return ref

    made = {f"d{index}": definition(index) for index in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": made | {f"d{count}": {"type": "null"}}}


def grammar_by_reference(draw: random.Random) -> str:
    """Rules or terminals that refer to each other, in Lark's notation or GBNF."""
    count = draw.choice((*LEVELS, 20_000))
    match draw.choice(("lark", "terminals", "gbnf", "ambiguous", "text")):
        case "lark":
            return "start: a0\n" + "".join(f'a{one}: "x" a{one + 1}\n' for one in range(count)) + f'a{count}: "y"\n'
        case "terminals":
            return "start: A0\n" + "".join(f'A{one}: "x" A{one + 1}\n' for one in range(count)) + f'A{count}: "y"\n'
        case "gbnf":
            rules = "".join(f'a{one} ::= "x" a{one + 1}\n' for one in range(count))
            return f'root ::= a0\n{rules}a{count} ::= "y"\n'
        case "ambiguous":
            return 'start: "x" a\na: a a a | "y" | b\nb: b b | a | "z" | "y"\n'
    return "".join(draw.choices('start: root::="xy"|()[]{}*+?\n %ignore/', k=draw.choice((3, 40, 400))))


def odd_value(draw: random.Random, depth: int = 0) -> Any:
    """A value of JSON that hardly any field wants."""
    kind = draw.randrange(8 if depth < 3 else 6)
    if kind < 6:
        return draw.choice([None, True, -1, 0, 2**63, 1e308, 1.5, "", "x", "\u0000", "\ud800", "é" * 300, "user"])
    several = [odd_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 6:
        return several
    keys = ("role", "content", "type", "text", "function", "name", "schema", "$ref", "", "\udfff")
    return {draw.choice(keys): one for one in several}


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

    async def schemas(self) -> None:
        """Structured requests by reference: an answer, or the error of this request."""
        draw = self.draw
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30, "temperature": 1.0}
        if draw.random() < 0.6:
            made = {"name": "x", "schema": schema_by_reference(draw)}
            body["response_format"] = {"type": "json_schema", "json_schema": made}
        else:
            body["structured_outputs"] = {"grammar": grammar_by_reference(draw)}
        said = await self.post(
            "/v1/chat/completions", json.dumps(body).encode(), patience=draw.choice((0.3, 5.0, 20.0))
        )
        self.note("schemas", said)
        if said.startswith(b"HTTP/1.1 200") and "response_format" in body:
            (choice,) = json.loads(said.partition(b"\r\n\r\n")[2])["choices"]
            if choice["finish_reason"] == "stop":
                json.loads(choice["message"]["content"])
                self.counts["schemas whole"] += 1

    async def bodies(self) -> None:
        """Bodies that are too deep, too wide, of odd values or of large answers."""
        draw = self.draw
        path = draw.choice(PATHS)
        match draw.choice(("deep", "wide", "odd", "long", "many")):
            case "deep":
                depth = draw.choice((90, 400, 976, 1_000, 3_000, 100_000))
                open_, close = draw.choice((("[", "]"), ('{"a":', "}")))
                nested = open_ * depth + "1" + close * depth
                padding = "x" * draw.choice((0, 300_000))
                role, wrong = '{"role":"user","content":"Hi","padding":"' + padding + '","deep":', nested + "}"
                data = '{"max_tokens":2,"messages":[' + role + wrong + "]}"
            case "wide":
                data = "{" + ",".join(f'"x{one}":{one}' for one in range(draw.choice((100, 20_000, 400_000)))) + "}"
            case "long":
                text = draw.choice(("a", "so on ", "\n", "é", "\\u0041")) * draw.choice((1_000, 200_000, 2_000_000))
                data = f'{{"prompt":{json.dumps(text)},"input":"x","messages":[{{"role":"user","content":"Hi"}}]}}'
            case "many":
                data = json.dumps({
                    "prompt": ["One day"] * draw.choice((1, 4)), "n": draw.choice((1, 4)), "max_tokens": 100,
                    "logprobs": 20, "messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 20,
                    "stream": draw.random() < 0.5,
                })  # fmt: skip
                path = "/v1/completions"
            case _:
                names = ("prompt", "messages", "max_tokens", "n", "stop", "seed", "tools", "input", "tokens",
                         "stream", "logit_bias", "response_format", "structured_outputs", "request_id")  # fmt: skip
                given = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a", "max_tokens": 2}
                odd = {draw.choice(names): odd_value(draw) for _ in range(draw.choice((1, 1, 2, 4)))}
                data = json.dumps(given | odd)
        self.note("bodies", await self.post(path, data.encode(), patience=draw.choice((0.1, 5.0, 20.0))))

    async def post(self, path: str, data: bytes, *, patience: float) -> bytes:
        head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        head = head % path.encode() + b"Content-Length: %d\r\n\r\n" % len(data)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        said = b""
        with contextlib.suppress(OSError, TimeoutError):
            try:
                async with asyncio.timeout(patience):
                    writer.write(head + data)
                    await writer.drain()
                    while more := await reader.read(1 << 20):
                        said += more
            finally:
                writer.close()
        return said

    def note(self, what: str, said: bytes) -> None:
        status = said.split(b" ", 2)[1].decode("latin-1") if said.startswith(b"HTTP/1.1 ") else "none"
        self.counts[f"{what} {status}"] += 1
        assert status not in ("500", "502"), said[:500]

    async def run(self, attack: Callable[[], Any], until: float) -> None:
        while asyncio.get_running_loop().time() < until:
            await attack()
            await asyncio.sleep(0.02)


ATTACKS = (Attackers.heads, Attackers.framing, Attackers.storm, Attackers.schemas, Attackers.bodies)


class MallocInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "mapped", "usmblks",
                                                     "fsmblks", "used", "free", "keepcost")]  # fmt: skip


def live_bytes() -> int:
    """Return the bytes that are allocated. What is resident beyond them are holes, which are used again."""
    blocks = sys.getallocatedblocks() * 94  # bytes of one, on average
    try:
        mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):  # not a recent glibc
        return blocks
    mallinfo.restype = MallocInfo
    info = mallinfo()
    return int(info.used + info.mapped + blocks)


@pytest.mark.timeout(SECONDS * 2 + 600)
@pytest.mark.parametrize(
    "seconds", [pytest.param(30.0, marks=pytest.mark.slow), pytest.param(SECONDS, marks=pytest.mark.soak)]
)
def test_strangers_change_no_answer_and_leave_nothing_behind(
    tmp_path: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "KEPT", 16)  # so that the first quarter has filled what is kept
    for name in ("uvicorn.error", "rekindle.server"):  # pytest would keep thirty thousand warnings
        monkeypatch.setattr(logging.getLogger(name), "level", logging.ERROR)
    options: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 256, "max_requests": 16, "cache_dir": str(tmp_path),
        "host_memory": 1 << 24,
    }  # fmt: skip
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
                    for attack in ATTACKS:
                        group.create_task(attackers.run(functools.partial(attack, attackers), until))
                await comes_to_rest(server)
            return counts, attackers.counts

        live: list[int] = []
        descriptors: list[int] = []
        for seed in range(4):
            counts, seen = asyncio.run(phase(seed, seconds / 4))
            wait_until_idle(session)
            gc.collect()
            with contextlib.suppress(OSError, AttributeError):  # not on glibc
                ctypes.CDLL("libc.so.6").malloc_trim(0)
            live.append(live_bytes())
            descriptors.append(process.num_fds())
            held = f"{live[-1] >> 20} MiB live, {process.memory_info().rss >> 20} resident"
            print(f"{counts}; {dict(sorted(seen.items()))}; {held}, {descriptors[-1]} descriptors")
            assert counts.finished > 0 and len({name.split()[0] for name in seen}) == len(ATTACKS)
        assert max(live[2:]) - max(live[:2]) < GROWTH, live
        assert descriptors[-1] <= descriptors[0] + 8, descriptors
