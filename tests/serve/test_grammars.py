"""Grammars over a real socket: the error of one that can't be compiled is its sender's, and others get answers."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from helpers.sessions import eventually, front_of
from helpers.thorough import trio_in_ci
from rekindle import Server, Session
from rekindle._src.capabilities.guides import request as structures
from rekindle._src.capabilities.guides.request import GRAMMARS
from rekindle._src.structured import compilers
from serve.conftest import chatting_session, checked

pytest.importorskip("uvicorn", reason="the server is the extra `serve`")
pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
pytestmark = pytest.mark.anyio
CHAIN = {f"d{index}": {"type": "array", "items": {"$ref": f"#/$defs/d{index + 1}"}} for index in range(1_500)}
DEEP = {"$ref": "#/$defs/d0", "$defs": CHAIN | {"d1500": {"type": "null"}}}
SLOW = {"type": "string", "allOf": [{"pattern": f"a{index}.*b"} for index in range(60)]}


@pytest.fixture
def session() -> Iterator[Session]:
    yield from checked(chatting_session())


def answer(server: Server, schema: Any = None, *, key: str = "none", **fields: Any) -> tuple[int, Any, str | None]:
    """Status, body and Retry-After of a chat."""
    body: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8, **fields}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json", "x-api-key": key}
        )
        response = connection.getresponse()
        return response.status, json.load(response), response.getheader("retry-after")
    finally:
        connection.close()


@trio_in_ci
async def test_a_grammar_that_overflows_or_takes_too_long_gets_400_and_others_their_answers(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "COMPILE_SECONDS", 0.3)
    async with await session.serve() as server:
        with ThreadPoolExecutor(4) as callers:
            slow = callers.submit(answer, server, SLOW)
            deep = callers.submit(answer, server, DEEP)
            plain = callers.submit(answer, server)
            simple = callers.submit(answer, server, {"type": "array", "items": {"type": "null"}, "maxItems": 1})
            assert plain.result()[0] == simple.result()[0] == 200
            for culprit, why in ((slow, "took over 0.3 s to compile"), (deep, "has a chain of 1,501 references")):
                status, body, _ = culprit.result()
                assert status == 400, body
                assert why in body["error"]["message"]
                assert body["error"]["param"] == "response_format.json_schema.schema"
        assert answer(server, structured_outputs={"regex": "[0-9]{3}"})[0] == 200


@trio_in_ci
async def test_sixty_that_wait_for_a_compiler_slow_nothing_down_and_are_told_to_come_again(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structures, "PATIENCE", 2.0)
    grammars = GRAMMARS.of(front_of(session))
    assert grammars is not None
    goes, compile_it = threading.Event(), grammars.compilers.compile

    def compile(spec: Any, text: str) -> Any:
        assert spec.kind != "regex" or goes.wait(60)
        return compile_it(spec, text)

    monkeypatch.setattr(grammars.compilers, "compile", compile)
    async with await session.serve() as server:
        with ThreadPoolExecutor(64) as callers:
            try:
                waiting = [
                    callers.submit(answer, server, structured_outputs={"regex": f"[0-9]{{{count}}}"})
                    for count in range(1, 61)
                ]
                eventually(lambda: len(grammars.compilers.others.jobs) >= 50, 60)
                plain = [answer(server)[0] for _ in range(5)]
                simple = answer(server, {"type": "array", "items": {"type": "null"}, "maxItems": 1})[0]
                assert plain == [200] * 5 and simple == 200
                assert sum(one.done() for one in waiting) < 60, "they went before the others"
                eventually(lambda: sum(one.done() for one in waiting) == 58, 60)
            finally:
                goes.set()
            answers = [one.result() for one in waiting]
    assert sorted(status for status, *_ in answers) == [200] * 2 + [503] * 58
    assert {retry for status, _, retry in answers if status == 503} == {"5"}
    busy = next(body for status, body, _ in answers if status == 503)
    assert "grammars of other requests are being compiled" in busy["error"]["message"]


@trio_in_ci
async def test_compilers_are_shared_between_keys_whatever_their_salts(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty grammars of one key wait, each with a salt of its own; that of another key comes after those at work."""
    grammars = GRAMMARS.of(front_of(session))
    assert grammars is not None
    goes, order, compile_it, take = (
        threading.Event(),
        list[str](),
        grammars.compilers.compile,
        grammars.compilers.next_job,
    )

    def compile(spec: Any, text: str) -> Any:
        assert goes.wait(60)
        return compile_it(spec, text)

    def take_and_note(lane: Any) -> Any:
        with grammars.compilers._changed:  # so that they are noted in the order in which they are taken
            job = take(lane)
            order.extend([] if job is None else [job.spec.text])
            return job

    monkeypatch.setattr(grammars.compilers, "compile", compile)
    monkeypatch.setattr(grammars.compilers, "next_job", take_and_note)
    async with await session.serve(api_key=["many", "one"]) as server:
        with ThreadPoolExecutor(24) as callers:
            try:
                several = [
                    callers.submit(answer, server, key="many", cache_salt=f"salt {count}",
                                   structured_outputs={"regex": f"[0-9]{{{count}}}"})
                    for count in range(1, 21)
                ]  # fmt: skip
                eventually(lambda: len(order) == 2 and len(grammars.compilers.others.jobs) == 18, 60)
                several.append(callers.submit(answer, server, key="one", structured_outputs={"regex": "[a-b]"}))
                eventually(lambda: len(grammars.compilers.others.jobs) == 19, 60)
            finally:
                goes.set()
            assert [one.result()[0] for one in several] == [200] * 21
    assert order.index("[a-b]") == 2
