"""What a short request stands for is counted before it is made: references, repeated tools, and what choices share."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from helpers.asgi import post
from helpers.bounds import Within
from rekindle._src.calls import chats
from rekindle._src.calls.handle import Handle
from rekindle._src.serve import responses
from rekindle._src.serve.chat import tool_options
from rekindle._src.serve.life import CHARACTERS_PER_TOKEN, Life
from rekindle._src.serve.responses import messages_of
from rekindle.errors import InvalidRequest, abbreviated
from serve.replies import no_pictures

pytestmark = pytest.mark.anyio
MOST_REFERENCES = 9_999


def kept(app: Any, characters: int) -> dict[str, str]:
    """Keep an answer of so many characters. Return a reference to it."""
    part = {"type": "output_text", "text": "a" * characters}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "content": [part]}
    app.state.rekindle.item_store.keep("127.0.0.1", [item])
    return {"type": "item_reference", "id": "msg_1"}


@pytest.mark.usefixtures("short_turns")
async def test_references_to_a_kept_answer_are_counted_before_they_are_joined(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "messages_of", lambda *fields: pytest.fail("it was joined"))
    looked_up: list[str] = []
    store = app.state.rekindle.item_store
    get = store.get
    monkeypatch.setattr(store, "get", lambda *arguments: looked_up.append("") or get(*arguments))
    answer = await post(app, "/v1/responses", {"input": [kept(app, 100_000)] * MOST_REFERENCES})
    assert answer.status == 413 and answer.error["param"] == "input" and answer.error["code"] == "body_too_large"
    assert len(looked_up) <= app.state.rekindle.body_limit // 100_000 + 1, "it looked no further than the bound"


async def test_a_request_waits_with_the_tokens_that_its_references_stand_for(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []
    request = Life.request

    def counted(self: Life, request_id: str, key: bytes, count: int, **options: Any) -> Any:
        tokens.append(count)
        return request(self, request_id, key, count, **options)

    monkeypatch.setattr(Life, "request", counted)
    await post(app, "/v1/responses", {"input": [kept(app, 4_000)] * 20, "max_output_tokens": 1})
    assert 20 * 4_000 <= CHARACTERS_PER_TOKEN * tokens[0] < 25 * 4_000


@pytest.mark.clock
def test_many_parts_of_one_message_are_joined_once() -> None:
    def seconds(count: int) -> float:
        items = [{"role": "assistant", "content": "a" * 4_000}] * count
        times = []
        for _ in range(3):
            began = time.process_time()
            (message,) = messages_of({"input": items}, no_pictures)
            times.append(time.process_time() - began)
        assert len(message["content"]) == 4_001 * count - 1
        return min(times)

    assert seconds(4_000) < 9 * max(seconds(1_000), 0.01), "16 times as long for 4 times as many"


def test_texts_of_one_message_are_lines_and_empty_ones_before_them_are_none() -> None:
    def joined(*texts: str) -> str:
        (message,) = messages_of({"input": [{"role": "assistant", "content": text} for text in texts]}, no_pictures)
        return str(message["content"])

    assert joined("") == "" and joined("", "", "a") == "a"
    assert joined("a", "", "b", "") == "a\n\nb\n"
    (message,) = messages_of(
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]}, no_pictures
    )
    assert message["content"] == "" and len(message["tool_calls"]) == 1


def test_a_tool_that_is_allowed_many_times_is_there_once() -> None:
    tools = [{"type": "function", "function": {"name": name, "description": "x" * 1000}} for name in ("a", "b")]
    named = [{"type": "function", "name": name} for name in "ba" * 5_000]
    options = {"tools": tools, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": named}}
    assert [tool["function"]["name"] for tool in tool_options(options)["tools"]] == ["b", "a"]


async def test_a_prompt_is_decoded_once_for_all_its_choices(
    app: Any, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    kind = type(session.tokenizer)
    decode = kind.decode

    def counted(self: Any, ids: Any, *arguments: Any, **options: Any) -> str:
        decoded.append(len(ids))
        return str(decode(self, ids, *arguments, **options))

    monkeypatch.setattr(kind, "decode", counted)
    prompt = [*b"a prompt of its own length"]
    for stream in (False, True):
        decoded.clear()
        answer = await post(
            app, "/v1/completions", {"prompt": prompt, "n": 8, "echo": True, "max_tokens": 2, "stream": stream}
        )
        assert answer.status == 200
        assert decoded.count(len(prompt)) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_the_tokens_of_a_prompt_are_counted_once_in_a_stream(
    app: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    looks: list[int] = []
    ids = Handle.prompt_token_ids

    def counted(self: Any) -> Any:
        looks.append(1)
        return ids.__get__(self)

    monkeypatch.setattr(Handle, "prompt_token_ids", property(counted))
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    body = {name: value for name, value in body.items() if (name == "prompt") == (path == "/v1/completions")}
    usage = (
        {} if path == "/v1/messages" else {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    )
    answer = await post(app, path, {**body, **usage, "max_tokens": 20, "stream": True})
    assert answer.status == 200 and len(answer.events) > 15
    assert len(looks) == 1


async def test_a_request_of_many_values_is_made_in_a_thread(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools of 120 kB in 40,000 lists took 0.1 s of the server's loop, in which no other stream went on."""
    threads: list[bool] = []
    chat = chats.ChatRequests.chat

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return chat(self, *arguments, **options)

    monkeypatch.setattr(chats.ChatRequests, "chat", noted)
    hi = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    few, many = ({"x": [[]] * count} for count in (1_000, 5_000))
    for path in ("/v1/chat/completions", "/v1/messages"):
        for values in (few, many):
            answer = await post(app, path, {**hi, "metadata": values})
            assert answer.status == 200, answer.body
    assert threads == [True, False, True, False]


def test_of_a_large_value_an_error_looks_at_no_more_than_it_shows(within: Within) -> None:
    for value in (
        {"a": [1, None, True, "x'y", 1.5, {"b": []}], "c": {}}, [], [[]], "short", "it's", [["a"] * 3] * 3, -5, None,
    ):  # fmt: skip
        text = repr(value)
        assert abbreviated(value) == (text if len(text) <= 80 else text[:77] + "..."), value
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    large = ["y" * 10_000_000] * 1_000_000
    with within(1):
        for value in (
            deep,
            large,
            {"z" * 1_000_000: large},
            {"a": large},
            [{"a": deep}],
            "w" * 10_000_000,
            (1,) * 10**6,
        ):
            assert len(abbreviated(value)) == 80
        assert abbreviated(json.loads("1" * 4_000) ** 2) == "<int>"
    while isinstance(deep, list):  # freed from the outside: nothing recurses
        (deep,) = deep


@pytest.mark.parametrize("name", ["logit_bias", "steer", "structured_outputs"])
async def test_a_name_as_long_as_a_body_does_not_come_back_in_its_error(app: Any, name: str) -> None:
    """It did so twice, in `message` and in `param`: 30 MB of control characters made an answer of 60 MB, in one go."""
    answer = await post(app, "/v1/completions", {"prompt": "hi", name: {"\1" * 100_000: "x"}})
    assert answer.status == 400 and len(answer.body) < 3_500
    assert answer.error["param"].startswith(f"{name}.\1") and len(answer.error["param"]) < 250


def test_an_error_of_a_session_looks_at_the_beginning_of_a_large_value_alone() -> None:
    """Its whole text was made, twice for an HTTP request, while nothing else could run."""
    shown = list[int]()

    class Counted:
        def __repr__(self) -> str:
            shown.append(1)
            return "y" * 10

    error = InvalidRequest("prompt", [Counted()] * 10_000, "is wrong", "Change it")
    assert len(shown) < 20
    assert str(error) == f"prompt=[{', '.join(['y' * 10] * 10)[:116]}...: is wrong. Change it"
