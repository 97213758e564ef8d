"""A hostile request to a busy server or fleet ends at most itself: other streams finish with their own texts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from helpers.chatting import HERMES
from helpers.fleets import LocalReplica, local_fleet
from helpers.loopback import Case, Counts, stream
from helpers.sessions import CONFIG, byte_tokenizer, eventually, parts
from rekindle import Fleet, Server, Session
from rekindle._src.structured import compilers
from rekindle._src.text.chat import ChatTemplate

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")
BUSY = 6  # streams at any time
HI = [{"role": "user", "content": "Hi"}]
CHAIN = {f"d{index}": {"type": "array", "items": {"$ref": f"#/$defs/d{index + 1}"}} for index in range(1_500)}
DEEP = {"$ref": "#/$defs/d0", "$defs": CHAIN | {"d1500": {"type": "null"}}}
RULES = "start: a0\n" + "".join(f'a{one}: "x" a{one + 1}\n' for one in range(5_000)) + 'a5000: "y"\n'
GBNF = "root ::= a0\n" + "".join(f'a{one} ::= "x" a{one + 1}\n' for one in range(20_000)) + 'a20000 ::= "y"\n'
SLOW = {"type": "string", "allOf": [{"pattern": f"a{index}.*b"} for index in range(60)]}


def chatting_session() -> Session:
    scheduler, runner = parts(CONFIG, step_seconds=0.002)
    return Session(scheduler, runner, byte_tokenizer(), CONFIG, chat=ChatTemplate(HERMES), model="fake")


def cases_of(session: Any) -> list[Case]:
    made = []
    for number in range(3):
        messages = [{"role": "user", "content": f"Tell me of the day {number}"}]
        done = session.chat(messages, max_tokens=80, temperature=0.0).result_sync()
        made.append(Case({"messages": messages, "max_tokens": 80, "temperature": 0.0}, done.text, "length"))
    return made


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    with contextlib.closing(chatting_session()) as session:
        return cases_of(session)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with contextlib.closing(chatting_session()) as session:
        with contextlib.closing(session.serve(body_limit=32 << 20).result_sync()) as made:
            yield made
        session.check_integrity()


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[Fleet, list[LocalReplica]]]:
    with local_fleet(chatting_session, replicas=3) as made:
        yield made


Attack = Callable[[int], Awaitable[None]]


def beside_streams(port: int, cases: list[Case], attack: Attack) -> Counts:
    """Run an attack on a server that is never without streams; each of them has to end, with its text."""
    counts, over = Counts(), asyncio.Event()

    async def neighbour(number: int) -> None:
        while not over.is_set():
            await stream(port, cases[number % len(cases)], counts)

    async def run() -> None:
        async with asyncio.timeout(240), asyncio.TaskGroup() as group:
            for number in range(BUSY):
                group.create_task(neighbour(number))
            await asyncio.to_thread(eventually, lambda: counts.open >= BUSY)
            try:
                await attack(port)
                ended = counts.finished + BUSY  # of those that were there, and of new ones
                await asyncio.to_thread(eventually, lambda: counts.finished >= ended, 120)
            finally:
                over.set()

    asyncio.run(run())
    assert set(counts.statuses) == {200}
    return counts


async def post(port: int, path: str, body: Any, *, host: str = "localhost") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    with contextlib.suppress(ConnectionError):  # refused before all of it was sent
        await writer.drain()
    lines, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    first, *rest = lines.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in rest)
    return int(first.split()[1]), headers, answer


async def chat(port: int, **fields: Any) -> tuple[int, dict[str, str], bytes]:
    return await post(port, "/v1/chat/completions", {"messages": HI, "max_tokens": 4, **fields})


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


@pytest.mark.thorough
def test_chains_of_references_and_rules(server: Server, cases: list[Case]) -> None:
    pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")

    async def attack(port: int) -> None:
        for fields in ({"response_format": schema(DEEP)}, {"structured_outputs": {"grammar": RULES}}):
            status, _, body = await chat(port, **fields)
            assert status == 400 and b"has a chain of" in body

    beside_streams(server.port, cases, attack)


@pytest.mark.thorough
def test_grammars_that_take_too_long_leave_others_a_place(
    server: Server, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three take too long; others get a grammar meanwhile, or are told to come again, and never that it is theirs."""
    pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
    monkeypatch.setattr(compilers, "COMPILE_SECONDS", 0.3)

    async def attack(port: int) -> None:
        culprits = [
            asyncio.create_task(chat(port, response_format=schema({**SLOW, "maxLength": 50 + number})))
            for number in range(2)
        ]
        culprits += [asyncio.create_task(chat(port, structured_outputs={"grammar": GBNF}))]
        victims = [
            asyncio.create_task(chat(port, structured_outputs={"regex": f"[0-9]{{{number}}}"})) for number in (1, 2, 3)
        ]
        simple = await chat(port, response_format=schema({"type": "array", "maxItems": 1}))
        assert simple[0] == 200
        for victim in victims:
            status, headers, body = await victim
            assert status == 200 or (status == 503 and "retry-after" in headers), body
        for culprit in culprits:
            assert (await culprit)[0] in (400, 503)

    beside_streams(server.port, cases, attack)


def test_heads_without_end_and_names_of_others(server: Server, cases: list[Case]) -> None:
    async def attack(port: int) -> None:
        for again in (b"a" * 65_536, b"X-Header: a\r\n" * 4_096):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
            with contextlib.suppress(ConnectionError):
                for _ in range(1_600):  # 100 MB
                    writer.write(again)
                    await writer.drain()
                    if reader.at_eof():
                        break
            writer.close()
        assert (await post(port, "/v1/completions", {"prompt": "a"}, host="evil.example"))[0] == 403

    beside_streams(server.port, cases, attack)


@pytest.mark.thorough
def test_large_requests_and_large_answers(server: Server, cases: list[Case]) -> None:
    fields = b'{"prompt":"a",' + b",".join(b'"x%d":1' % one for one in range(1_000_000)) + b"}"
    scores = {"prompt": "Hi", "n": 64, "max_tokens": 60, "logprobs": 20, "temperature": 1.0}
    response = {"input": "Hi", "top_logprobs": 20, "include": ["message.output_text.logprobs"], "stream": True}

    async def attack(port: int) -> None:
        assert (await post(port, "/tokenize", {"prompt": "so on " * 5_000_000}))[0] == 400
        assert (await post(port, "/v1/completions", fields))[0] == 413
        answers = await asyncio.gather(
            post(port, "/v1/completions", scores), post(port, "/v1/responses", response | {"max_output_tokens": 300})
        )
        assert [status for status, *_ in answers] == [200, 200] and len(answers[0][2]) > 500_000

    beside_streams(server.port, cases, attack)


def test_a_fleet_and_messages_of_any_depth(fleet: tuple[Fleet, list[LocalReplica]], cases: list[Case]) -> None:
    """Send nested messages with 300 kB of padding, and half a surrogate pair as a salt."""
    padding = "x" * 300_000

    async def attack(port: int) -> None:
        for depth in (90, 400, 950, 976, 1_100, 5_000):
            deep = '{"a":' * depth + "1" + "}" * depth
            message = f'{{"role":"user","content":"a","padding":"{padding}","deep":{deep}}}'
            status, _, body = await post(
                port, "/v1/chat/completions", f'{{"max_tokens":2,"messages":[{message}]}}'.encode()
            )
            assert status in (200, 400), body
        assert (await chat(port, cache_salt="\ud800"))[0] == 400
        assert (await chat(port))[0] == 200

    made, before = fleet[0], fleet[0].stats().lost
    with contextlib.closing(made.serve().result_sync()) as server:
        beside_streams(server.port, cases, attack)
    assert (made.stats().lost, made.closed) == (before, False)


def test_a_fleet_and_a_request_that_replicas_die_of(fleet: tuple[Fleet, list[LocalReplica]], cases: list[Case]) -> None:
    made, replicas = fleet
    marked = b"\x01".decode()
    for one in replicas:
        one.deadly = lambda sent: bytes([1, 0, 0, 0]) in sent.tokens

    async def attack(port: int) -> None:
        status, _, body = await post(port, "/v1/completions", {"prompt": marked, "max_tokens": 4})
        assert status == 400 and b"died one after another" in body

    with contextlib.closing(made.serve().result_sync()) as server:
        beside_streams(server.port, cases, attack)
    assert made.stats().lost == 2 and not made.closed
    eventually(lambda: made.stats().ready == 3)
