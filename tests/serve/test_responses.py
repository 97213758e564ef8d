"""/v1/responses: items in, items out, the same as a stream of events; what would have to be kept is refused."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.asgi import post
from helpers.sessions import expected
from rekindle._src.core.records import FinishReason, TextDelta
from rekindle._src.core.reply import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStarted
from serve.replies import completion, exchange_for, sent

pytestmark = pytest.mark.anyio
RENDERED = "<system>Be brief\n<user>Hello\n<assistant>"


def body(**more: Any) -> dict[str, Any]:
    return {"input": "Hello", "instructions": "Be brief", "max_output_tokens": 6, "temperature": 0, **more}


async def test_an_answer_and_its_events(app: Any) -> None:
    text = bytes(expected(RENDERED, max_tokens=6)).decode()
    done = (await post(app, "/v1/responses", body())).json()
    assert done["object"] == "response" and done["status"] == "incomplete" and done["store"] is False
    assert done["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = done["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == text
    assert done["usage"]["input_tokens"] == len(RENDERED) and done["usage"]["output_tokens"] == 6
    answer = await post(app, "/v1/responses", body(stream=True))
    events = answer.events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4:-4] == ["output_text.delta"] * 6
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == text
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text
    names = [line[7:] for line in answer.body.decode().split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in events]


async def test_what_comes_back_is_json_whatever_was_sent(app: Any) -> None:
    raw = b'{"input": "x", "max_output_tokens": 1, "metadata": {"a": 1e999}}'
    assert (await post(app, "/v1/responses", raw=raw)).status == 400
    kept = await post(app, "/v1/responses", body(metadata={"a": "é", "b": [1, None]}))
    assert kept.json()["metadata"] == {"a": "é", "b": [1, None]}


async def test_conversations_become_messages(app: Any) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "What is the weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "message", "role": "developer", "content": "Be nice"},
    ]
    from rekindle._src.serve.responses_in import messages_of

    found = messages_of({"input": items})
    assert [one["role"] for one in found] == ["user", "assistant", "tool", "developer"]
    assert found[1]["reasoning_content"] == "I look" and found[1]["tool_calls"][0]["id"] == "c1"
    assert (await post(app, "/v1/responses", body(input=items))).status == 200


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
    ],
)
async def test_what_is_not_kept_or_not_known_is_refused_by_name(app: Any, more: Any, param: str) -> None:
    answer = await post(app, "/v1/responses", body(**more))
    assert answer.status == 400 and answer.error["param"] == param, answer.body


async def test_thoughts_text_and_calls_are_items_one_after_another() -> None:
    from rekindle._src.serve.responses import _Answer

    exchange, session = exchange_for()
    events = (
        ReasoningDelta("I "), ReasoningDelta("think"), ContentDelta("Yes"), ToolCallStarted(0, "c1", "look"),
        ToolCallArguments(0, '{"at": 1}'), ToolCallStarted(1, "c2", "look"), ToolCallArguments(1, "{}"),
    )  # fmt: skip
    done = completion("", events=events, reason=FinishReason.EOS)
    streamed, whole = (_Answer(exchange, {}, "m", session, None) for _ in range(2))
    streamed.begin()
    for event in events:
        streamed.take(TextDelta("r", "", events=(event,)))
    streamed.end(done)
    await streamed.flush()
    whole.whole(done)
    output = [*whole.response(done)["output"]]
    told = sent(exchange)[-1]["response"]["output"]
    names = [{**item, "id": ""} for item in told], [{**item, "id": ""} for item in output]
    assert names[0] == names[1]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[2]["arguments"] == '{"at": 1}' and output[3]["call_id"] == "c2"
    only = _Answer(exchange, {"parallel_tool_calls": False}, "m", session, None)
    only.whole(done)
    assert [item["type"] for item in only.response(done)["output"]][-2:] == ["message", "function_call"]
