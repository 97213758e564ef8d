"""Large requests of many clients: what nobody waits for costs nothing, and a neighbour is answered meanwhile."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest

from helpers.asgi import post
from helpers.sessions import eventually, listener_of
from helpers.thorough import trio_in_ci
from rekindle import Server, Session
from rekindle._src.core import json_values
from rekindle._src.serve import bodies, exchange
from rekindle._src.serve.errors import ApiError
from rekindle._src.text.chat import ChatTemplate
from rekindle.serve import app
from serve.conftest import chatting_session, checked

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield from checked(chatting_session())


@pytest.fixture(scope="module")
def server(session: Session) -> Iterator[Server]:
    with contextlib.closing(session.serve().result_sync()) as made:
        yield made


def sent(server: Server, body: dict[str, Any]) -> socket.socket:
    """A connection over which a chat was sent."""
    data = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", server.port), 20)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
    return client


def answer(client: socket.socket) -> bytes:
    with client:
        said = b""
        while data := client.recv(65_536):
            said += data
        return said


SHORT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def test_chats_whose_clients_left_are_not_rendered(
    session: Session, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, rendered, run = threading.Event(), list[int](), ChatTemplate._run

    def counted(self: ChatTemplate, name: str, text: str, scope: dict[str, Any]) -> str:
        if len(scope["messages"]) > 1:
            rendered.append(len(scope["messages"]))
            assert gate.wait(30)
        return run(self, name, text, scope)

    monkeypatch.setattr(ChatTemplate, "_run", counted)
    long = {"messages": [{"role": "user", "content": "a"}] * 1_000, "max_tokens": 2}
    taken = session.stats().live
    clients = [sent(server, long) for _ in range(20)]
    eventually(lambda: session.stats().live == taken + 20 and len(rendered) == 2)
    for client in clients:
        client.close()
    assert b"200 OK" in answer(sent(server, SHORT))  # while two of them are still being rendered
    eventually(lambda: not listener_of(server).life.active)
    gate.set()
    eventually(lambda: session.stats().live == 0)
    assert len(rendered) == 2


def test_bodies_whose_clients_left_are_not_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, read, check = threading.Event(), list[int](), bodies.check_size

    def counted(data: bytearray, limit: int) -> int:
        if len(data) > bodies.IN_A_THREAD:
            read.append(len(data))
            assert gate.wait(30)
        return check(data, limit)

    monkeypatch.setattr(exchange, "check_size", counted)
    large = {"messages": [{"role": "user", "content": "a" * 200_000}], "max_tokens": 2}
    clients = [sent(server, large) for _ in range(12)]
    eventually(lambda: len(read) == 2 and len(listener_of(server).server_state.tasks) == 12)
    for client in clients:
        client.close()
    assert b"200 OK" in answer(sent(server, SHORT))
    eventually(lambda: len(listener_of(server).server_state.tasks) <= 2)
    gate.set()
    eventually(lambda: not listener_of(server).server_state.tasks)
    assert len(read) == 2


# Values.


def plain_count(text: str) -> int:
    inside = escaped = False
    count = 0
    for character in text:
        if inside:
            inside = escaped or character != '"'
            escaped = not escaped and character == "\\"
        elif character == '"':
            inside = True
        else:
            count += character in ",:[{"
    return count


def test_values_are_counted_outside_of_strings_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)

    def value(depth: int) -> Any:
        kind = draw.randrange(3 if depth else 6)
        if kind < 3:
            return draw.choice([1.5, None, "".join(draw.choices('a,:[{"\\\n', k=draw.randrange(12)))])
        several = [value(depth + 1) for _ in range(draw.randrange(5))]
        return several if kind == 3 else {str(index) + "\\" * index: one for index, one in enumerate(several)}

    for size in (1, 2, 3, 5, 64):
        monkeypatch.setattr(json_values, "BLOCK", size)
        for _ in range(200):
            text = json.dumps(value(0))
            count = plain_count(text)
            names = len(re.findall(r":", re.sub(r'"(\\.|[^"\\])*"', "", text)))
            bodies.check_values(text.encode(), count, names)
            if count:
                with pytest.raises(ApiError, match="JSON values"):
                    bodies.check_values(text.encode(), count - 1, names)
            if names:
                with pytest.raises(ApiError, match="named fields"):
                    bodies.check_values(text.encode(), count, names - 1)


@pytest.mark.anyio
async def test_a_million_unknown_fields_are_refused_and_a_million_commas_in_a_text_are_not(session: Session) -> None:
    served = app(session, body_limit=8 << 20)  # so that 262,144 values may come
    fields = b"{" + b",".join(b'"%x":1' % at for at in range(40_000)) + b"}"
    numbers = b'{"prompt":[' + b"1," * 300_000 + b"1]}"
    for raw, bound in ((numbers, "262,144 JSON values"), (fields, "32,768 named fields")):
        many = await post(served, "/v1/completions", raw=raw)
        assert many.status == 413 and many.error["code"] == "body_too_large" and bound in many.error["message"]
    text = await post(served, "/tokenize", {"prompt": ',[{"' * 100_000})
    assert text.status == 200 and text.json()["count"] == 400_000


@pytest.mark.usefixtures("short_turns")
def test_bodies_that_are_slow_to_parse_leave_others_their_turns() -> None:
    """Whole numbers of thousands of digits, and half a surrogate pair in, or after, megabytes of text."""
    with pytest.raises(ApiError, match="a number of 4,000 characters, and at most 1,000 are read"):
        bodies.parse(b'{"prompt":[' + b",".join([b"1" * 4_000] * 4_000) + b"]}")
    with pytest.raises(ApiError, match=r"a number of 2,000,002 characters"):
        bodies.parse(b'{"temperature":0.' + b"1" * 2_000_000 + b"}")
    assert bodies.parse(b"[" + b"9" * 1_000 + b",-0,-0.0]") == [10**1_000 - 1, 0, 0.0]
    text = "a" * (10 << 20)
    assert bodies.parse(f'{{"prompt":"{text}\\ud83d\\ude00"}}'.encode()) == {"prompt": f"{text}\U0001f600"}
    for half in (f'"{text}\\ud83d"', '{"a\\udc00":[1]}', '[[{"a":["x\\ud800y"]}]]'):
        with pytest.raises(ApiError, match="half a surrogate pair"):
            bodies.parse(half.encode())


@pytest.mark.anyio
@trio_in_ci
async def test_what_is_counted_is_bounded(session: Session) -> None:
    served = app(session)
    for body in ({"prompt": "a" * (1 << 20) + "b"}, {"messages": [{"role": "user", "content": "a" * (1 << 20)}]}):
        refused = await post(served, "/tokenize", body)
        assert refused.status == 400 and refused.error["param"] in body and "1,048,576" in refused.error["message"]
    many = await post(served, "/detokenize", {"tokens": [72] * ((1 << 18) + 1)})
    assert many.status == 400 and "262,145 ids" in many.error["message"] and many.error["param"] == "tokens"
    counted = {"messages": [{"role": "user", "content": "a" * (1 << 20)}], "model": "fake"}
    assert (await post(served, "/v1/messages/count_tokens", counted)).status == 400


@pytest.fixture
def slow() -> Iterator[Session]:
    yield from checked(chatting_session(step_seconds=0.005))


@pytest.mark.anyio
async def test_a_request_that_takes_all_places_leaves_some_and_a_turn_to_others(slow: Session) -> None:
    """One request for a thousand sequences, or for embeddings of as many texts, had all others refused."""
    served, places = app(slow, api_key=["mine", "another"]), slow.config.max_queue + slow.config.max_requests
    answers = list[Any]()

    async def ask(key: str, **options: int) -> int:
        body = {"prompt": "Hello", "max_tokens": 2, **options}
        answer = await post(served, "/v1/completions", body, headers={"x-api-key": key})
        if "n" in options:
            answers.append(answer)
        return answer.status

    async with anyio.create_task_group() as group:
        group.start_soon(partial(ask, "another", n=places, max_tokens=40))
        await anyio.to_thread.run_sync(eventually, lambda: slow.stats().live == places)
        assert await ask("another") == 429
        assert [await ask("mine") for _ in range(3)] == [200, 200, 200]
        assert not answers and slow.stats().live > places // 2, "they waited for the other caller's"
    assert answers[0].status == 200 and len(answers[0].json()["choices"]) == places
