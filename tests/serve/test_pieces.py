"""Large answers are made bit by bit: the same JSON as in one go, with other tasks in between."""

from __future__ import annotations

import json
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from helpers.asgi import Answer, post
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.serve import bodies
from rekindle._src.serve.bodies import Entries
from rekindle.serve import app

pytestmark = pytest.mark.anyio
SCORES = ["message.output_text.logprobs"]
BODIES: dict[str, Any] = {
    "/v1/completions": {"prompt": "Hello", "logprobs": 20, "n": 8, "max_tokens": 40, "prompt_logprobs": 5},
    "/v1/chat/completions": {"logprobs": True, "top_logprobs": 20, "n": 8, "max_tokens": 40},
    "/v1/responses": {"input": "Hello", "top_logprobs": 20, "include": SCORES, "max_output_tokens": 200},
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("value", "short"),
    [
        ({"a": {"b": [1, None, "é"]}, "c": []}, {"a": {"b": [1, None, "é"]}, "c": []}),
        ({"a": [*range(5_000)], "b": (1,) * 3_000}, {"a": [*range(5_000)], "b": [1] * 3_000}),
        (Entries([1, 2], lambda one: {"x": Entries([one] * 2, str)}), [{"x": ["1", "1"]}, {"x": ["2", "2"]}]),
        ({"none": Entries([], str), "deep": {"e": Entries("ab", str.upper)}}, {"none": [], "deep": {"e": ["A", "B"]}}),
        ([], []),
        ({}, {}),
        ([*range(2_048)], [*range(2_048)]),
    ],
)
async def test_it_is_the_same_json(value: Any, short: Any) -> None:
    text = await bodies.text_of(value)
    assert json.loads(text) == short and ": " not in text and ", " not in text
    assert text == json.dumps(short, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize(("path", "streamed"), [*((path, False) for path in BODIES), ("/v1/responses", True)])
async def test_others_run_while_a_large_answer_is_written(
    session: Session, path: str, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that only counts turns of the loop gets many of them between an answer's first and last byte."""
    monkeypatch.setattr(bodies, "SLICE_SECONDS", 0.0)
    written, turns, ended, finished = bodies.paced, 0, 0, False

    async def counting(parts: Any) -> Any:
        nonlocal ended
        began = turns
        async for part in written(parts):
            yield part
        ended = max(ended, turns - began)

    async def count() -> None:
        nonlocal turns
        while not finished:
            turns += 1
            await anyio.lowlevel.checkpoint()

    monkeypatch.setattr("rekindle._src.serve.exchange.paced", counting)
    body: dict[str, Any] = {"messages": MESSAGES} if path == "/v1/chat/completions" else {}
    body["stream"] = streamed
    async with anyio.create_task_group() as group:
        group.start_soon(count)
        answer: Answer = await post(app(session), path, {**body, **BODIES[path], "temperature": 0.9, "seed": 1})
        finished = True
    assert answer.status == 200, answer.body[:300]
    if streamed:  # the last events have the log-probabilities of all tokens
        scores = [len(event["logprobs"]) for event in answer.events if event["type"] == "response.output_text.done"]
        assert scores == [200] and answer.events[-1]["type"] == "response.incomplete"
    else:
        json.loads(answer.body)
    assert ended > (200 if streamed else 20)
