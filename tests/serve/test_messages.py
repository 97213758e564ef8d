"""/v1/messages: Anthropic's API, with its blocks, its events and its errors."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.asgi import post
from helpers.sessions import expected
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.core.records import TextDelta
from rekindle._src.core.reply import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStarted
from rekindle.serve import app as make_app
from serve.replies import completion, exchange_for, no_pictures, sent

pytestmark = pytest.mark.anyio
RENDERED = "<system>Be brief\n<user>Hello\n<assistant>"


def body(**more: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]}
    ]
    return {"system": "Be brief", "messages": messages, "max_tokens": 6, "temperature": 0, **more}


async def test_a_message_and_its_events(app: Any) -> None:
    text = bytes(expected(RENDERED, max_tokens=6)).decode()
    done = (await post(app, "/v1/messages", body())).json()
    assert done["type"] == "message" and done["stop_reason"] == "max_tokens" and done["id"].startswith("msg_")
    assert done["content"] == [{"type": "text", "text": text}]
    assert done["usage"]["input_tokens"] == len(RENDERED) and done["usage"]["output_tokens"] == 6
    events = (await post(app, "/v1/messages", body(stream=True))).events
    kinds = [event["type"] for event in events]
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * 6, "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == text
    assert events[-2]["delta"]["stop_reason"] == "max_tokens" and events[-2]["usage"]["output_tokens"] == 6


async def test_stop_sequences_and_prefilled_answers(app: Any) -> None:
    text = bytes(expected(RENDERED, max_tokens=6)).decode()
    done = (await post(app, "/v1/messages", body(stop_sequences=[text[3:5]]))).json()
    assert (done["stop_reason"], done["stop_sequence"]) == ("stop_sequence", text[3:5])
    messages = [*body()["messages"], {"role": "assistant", "content": "I am"}]
    begun = (await post(app, "/v1/messages", body(messages=messages))).json()
    rest = bytes(expected(RENDERED + "I am", max_tokens=6)).decode()
    assert begun["content"][0]["text"] == rest


async def test_counting_tokens(app: Any) -> None:
    asked = {name: value for name, value in body().items() if name in ("system", "messages")}
    assert (await post(app, "/v1/messages/count_tokens", asked)).json() == {"input_tokens": len(RENDERED)}


async def test_errors_have_anthropics_form(session: Session) -> None:
    served = make_app(session, api_key="secret")
    wrong = await post(served, "/v1/messages", body())
    assert wrong.status == 401 and wrong.error["type"] == "authentication_error"
    key = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
    missing = await post(served, "/v1/messages", {"messages": body()["messages"]}, headers=key)
    assert missing.status == 400 and missing.json()["type"] == "error"
    assert missing.error["type"] == "invalid_request_error" and "max_tokens" in missing.error["message"]
    image = body(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}])
    refused = await post(served, "/v1/messages", image, headers=key)
    assert refused.status == 400 and "messages[0].content[0].type" in refused.error["message"]
    other = await post(served, "/v1/messages", body(model="other"), headers=key)
    assert other.status == 404 and other.error["type"] == "not_found_error"


async def test_results_of_tools_come_before_what_the_user_says() -> None:
    from rekindle._src.serve.anthropic import messages_of

    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a door"}]}
    found = messages_of(
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}, call]},
                {"role": "user", "content": [{"type": "text", "text": "And?"}, result]},
                {"role": "user", "content": [{**result, "is_error": True}]},
            ]
        },
        no_pictures,
    )
    assert [one["role"] for one in found] == ["assistant", "tool", "user", "tool"]
    assert found[0]["reasoning_content"] == "Hm" and found[0]["tool_calls"][0]["function"]["arguments"] == {"at": 1}
    assert found[1]["content"] == "a door" and found[3]["content"] == "Error: a door"


async def test_thoughts_text_and_calls_are_blocks_one_after_another() -> None:
    from rekindle._src.serve.anthropic import _EventWriter, _message

    exchange, _ = exchange_for()
    events = (
        ReasoningDelta("I "), ReasoningDelta("think"), ContentDelta("Yes"), ToolCallStarted(0, "c1", "look"),
        ToolCallArguments(0, '{"at": 1}'), ToolCallStarted(1, "c2", "look"), ToolCallArguments(1, "{}"),
    )  # fmt: skip
    done = completion("", events=events)
    stream = _EventWriter(exchange, "m", parallel=True)
    stream.begin(10)
    for event in events:
        stream.take(TextDelta("r", "", events=(event,)))
    stream.end(done)
    await stream.flush()
    whole = _message(exchange, "m", done, parallel=True)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][2]["input"] == {"at": 1} and whole["stop_reason"] == "tool_use"
    assert whole["usage"]["input_tokens"] == 6 and whole["usage"]["cache_read_input_tokens"] == 4
    told = sent(exchange)
    starts = [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    opened = [event["index"] for event in told if event["type"] == "content_block_start"]
    closed = [event["index"] for event in told if event["type"] == "content_block_stop"]
    assert opened == closed == [0, 1, 2, 3]
    assert told[-2]["delta"]["stop_reason"] == "tool_use"
    assert len(_message(exchange, "m", done, parallel=False)["content"]) == 3
