"""Calls of tools and reasoning over all three chat APIs, from a model that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.asgi import post
from helpers.chatting import saying
from helpers.replies import tool
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle.serve import app as make_app

pytestmark = pytest.mark.anyio
TOOLS = [tool("weather", city="string"), tool("time")]
SAID = (
    "<think>They ask about Paris</think>Let me look."
    '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
)
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather?"}]
ANTHROPICS = [{"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in TOOLS]
CALLS = [("weather", {"city": "Paris"}), ("time", {})]


def script(prompt: str) -> str:
    if "sunny" in prompt:
        return "It is sunny."
    return SAID if "<|system|>Call tools" in prompt else "No tools here."


@pytest.fixture
def app() -> Iterator[Any]:
    with saying(script) as session:
        yield make_app(session)


async def chat(app: Any, **more: Any) -> Any:
    body = {"messages": QUESTION, "tools": TOOLS, "seed": 1, "max_tokens": 400, **more}
    answer = await post(app, "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer.events[:-1] if more.get("stream") else answer.json()


async def test_a_message_has_its_parts_and_reasoning_under_both_names(app: Any) -> None:
    choice = (await chat(app))["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "Let me look."
    assert message["reasoning"] == message["reasoning_content"] == "They ask about Paris"
    made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert made == CALLS and len({call["id"] for call in message["tool_calls"]}) == 2
    usage = (await chat(app))["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("They ask about Paris")


async def test_a_stream_adds_up_to_the_same(app: Any) -> None:
    whole = (await chat(app))["choices"][0]["message"]
    chunks = await chat(app, stream=True)
    content = reasoning = ""
    calls: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            entry = calls.setdefault(call["index"], {"arguments": ""})
            entry["arguments"] += call["function"]["arguments"]
            if "id" in call:
                entry |= {"id": call["id"], "name": call["function"]["name"]}
    assert (content, reasoning) == (whole["content"], whole["reasoning"])
    assert [calls[0], calls[1]] == [
        {"id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in whole["tool_calls"]
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_arguments_stream_while_they_are_written(app: Any, path: str) -> None:
    """Upstream: openai's own API sends the name first, then the arguments' text as it comes."""
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": 400, "tools": TOOLS}
    if path == "/v1/messages":
        body["tools"] = ANTHROPICS
    elif path == "/v1/responses":
        body = {"input": QUESTION, "tools": [{"type": "function", **one["function"]} for one in TOOLS]}
    events = (await post(app, path, {**body, "stream": True})).events
    if path == "/v1/chat/completions":
        calls = [call for event in events[:-1] for call in event["choices"][0]["delta"].get("tool_calls", ())]
        assert calls[0]["function"] == {"name": "weather", "arguments": ""} and calls[0]["id"]
        pieces = [call["function"]["arguments"] for call in calls[1:] if call["index"] == 0]
    elif path == "/v1/messages":
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == 2]
        pieces = [delta["partial_json"] for delta in deltas]
    else:
        told = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
        pieces = [event["delta"] for event in told if event["output_index"] == 2]
    assert "".join(pieces) == '{"city": "Paris"}' and len(pieces) == len("".join(pieces)), "one for each token"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_call_that_max_tokens_cuts_is_none(app: Any, path: str) -> None:
    cut = SAID.index('"Paris"') + 3
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": cut, "tools": TOOLS}
    if path == "/v1/messages":
        body["tools"] = ANTHROPICS
    elif path == "/v1/responses":
        tools = [{"type": "function", **one["function"]} for one in TOOLS]
        body = {"input": QUESTION, "max_output_tokens": cut, "tools": tools}
    whole = (await post(app, path, body)).json()
    events = (await post(app, path, {**body, "stream": True})).events
    begun = '{"city": "Pa'
    if path == "/v1/chat/completions":
        message = whole["choices"][0]["message"]
        assert message["content"] == SAID[SAID.index("Let") : cut] and "tool_calls" not in message
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
        calls = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
        assert "".join(calls) == begun, "as far as it was written"
        assert events[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    elif path == "/v1/messages":
        assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
        starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
        assert starts == ["thinking", "text", "tool_use", "text"]
        assert [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"] == ["max_tokens"]
    else:
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
        final = events[-1]["response"]
        assert final["status"] == whole["status"] == "incomplete"
        call = final["output"][2]
        assert (call["type"], call["arguments"], call["status"]) == ("function_call", begun, "incomplete")


async def test_one_call_no_call_no_reasoning(app: Any) -> None:
    assert len((await chat(app, parallel_tool_calls=False))["choices"][0]["message"]["tool_calls"]) == 1
    chunks = await chat(app, parallel_tool_calls=False, stream=True)
    indices = [call["index"] for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert set(indices) == {0}
    none = (await chat(app, tool_choice="none"))["choices"][0]
    assert none["message"]["content"] == "No tools here." and none["finish_reason"] == "stop"
    assert "tool_calls" not in none["message"]
    hidden = await chat(app, include_reasoning=False)
    assert "reasoning" not in hidden["choices"][0]["message"]
    chunks = await chat(app, include_reasoning=False, stream=True)
    assert all("reasoning" not in chunk["choices"][0]["delta"] for chunk in chunks)


async def test_results_go_back_to_the_model(app: Any) -> None:
    message = (await chat(app))["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in message["tool_calls"]]
    answer = await chat(app, messages=[*QUESTION, message, *results])
    assert answer["choices"][0]["message"]["content"] == "It is sunny."


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search", "function": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_wrong_tools_are_named(app: Any, more: Any, param: str) -> None:
    answer = await post(app, "/v1/chat/completions", {"messages": QUESTION, "tools": TOOLS, **more})
    assert answer.status == 400 and answer.error["param"] == param, answer.body


async def test_anthropics_blocks(app: Any) -> None:
    tools = [
        {"name": one["function"]["name"], "input_schema": one["function"]["parameters"], "description": "x"}
        for one in TOOLS
    ]
    body = {"messages": QUESTION, "tools": tools, "max_tokens": 400, "temperature": 0}
    done = (await post(app, "/v1/messages", body)).json()
    assert [block["type"] for block in done["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert [(block["name"], block["input"]) for block in done["content"][2:]] == CALLS
    assert done["stop_reason"] == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"} for block in done["content"][2:]]
    after = [*QUESTION, {"role": "assistant", "content": done["content"]}, {"role": "user", "content": results}]
    again = (await post(app, "/v1/messages", {**body, "messages": after})).json()
    assert again["content"] == [{"type": "text", "text": "It is sunny."}] and again["stop_reason"] == "end_turn"
    events = (await post(app, "/v1/messages", {**body, "stream": True})).events
    inputs: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            inputs[event["index"]] = inputs.get(event["index"], "") + event["delta"]["partial_json"]
    assert [json.loads(text) for text in inputs.values()] == [arguments for _, arguments in CALLS]
    assert [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"] == ["tool_use"]


async def test_items_of_responses(app: Any) -> None:
    tools = [{"type": "function", **one["function"]} for one in TOOLS]
    body: Any = {"input": QUESTION, "tools": tools, "temperature": 0}
    done = (await post(app, "/v1/responses", body)).json()
    kinds = [item["type"] for item in done["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"] and done["status"] == "completed"
    assert [(item["name"], json.loads(item["arguments"])) for item in done["output"][2:]] == CALLS
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"} for item in done["output"][2:]
    ]
    again = (await post(app, "/v1/responses", {**body, "input": [*QUESTION, *done["output"], *outputs]})).json()
    assert again["output"][0]["content"][0]["text"] == "It is sunny."
    events = (await post(app, "/v1/responses", {**body, "stream": True})).events
    final = events[-1]["response"]
    strip = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in final["output"]]
    assert strip == [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in done["output"]]


@pytest.mark.parametrize("arguments", ['{"city": "\\ud800"}', '{"\\udc00": 1}'])
async def test_half_a_character_in_the_arguments_of_a_call_is_the_clients_error(app: Any, arguments: str) -> None:
    """The body's text is whole: the escape is in a text within it, and templates write what it stands for."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turn = {"role": "assistant", "content": "Look.", "tool_calls": [call]}
    items = [{"type": "function_call", "call_id": "1", "name": "weather", "arguments": arguments}]
    for path, body in (
        ("/v1/chat/completions", {"messages": [*QUESTION, turn, *QUESTION], "tools": TOOLS}),
        ("/tokenize", {"messages": [*QUESTION, turn]}),
        ("/v1/responses", {"input": [*items, {"type": "function_call_output", "call_id": "1", "output": "sunny"}]}),
    ):
        answer = await post(app, path, body)
        assert answer.status == 400 and "half a surrogate pair" in answer.error["message"], (path, answer.body)
