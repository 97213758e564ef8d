"""/v1/chat/completions as OpenAI and vLLM define it, over fakes whose tokens are bytes."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.asgi import get, post
from helpers.sessions import expected
from helpers.thorough import anyio_backend  # noqa: F401  the fixture

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "Hello"}]
RENDERED = "<user>Hello\n<assistant>"


async def chat(app: Any, messages: Any = HELLO, **body: Any) -> Any:
    answer = await post(app, "/v1/chat/completions", {"messages": messages, "temperature": 0, **body})
    assert answer.status == 200, answer.body
    return answer.json()


async def prompt(app: Any, messages: Any = HELLO, **body: Any) -> str:
    """What the template made of a request."""
    done = await chat(app, messages, max_tokens=1, return_token_ids=True, **body)
    return bytes(done["prompt_token_ids"]).decode()


async def stream(app: Any, **body: Any) -> list[Any]:
    answer = await post(app, "/v1/chat/completions", {"messages": HELLO, "temperature": 0, "stream": True, **body})
    assert answer.status == 200 and answer.events[-1] == "[DONE]", answer.body
    return answer.events[:-1]


def text(count: int) -> str:
    return bytes(expected(RENDERED, max_tokens=count)).decode()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_temperatures_are_those_of_openai(app: Any, path: str) -> None:
    """A session takes more; a 9 over HTTP, which OpenAI refuses, drew nonsense."""
    body = {"prompt": "x", "input": "x", "messages": HELLO, "max_tokens": 2, "max_output_tokens": 2}
    names = {"/v1/completions": ("prompt", "max_tokens"), "/v1/responses": ("input", "max_output_tokens")}
    body = {name: body[name] for name in names.get(path, ("messages", "max_tokens"))}
    assert (await post(app, path, {**body, "temperature": 2})).status == 200
    refused = await post(app, path, {**body, "temperature": 9})
    assert refused.status == 400
    assert "temperature=9: must be between 0 and 2" in refused.error["message"]


async def test_an_answer_and_its_stream(app: Any) -> None:
    done = await chat(app, max_completion_tokens=7, max_tokens=3)
    assert done["object"] == "chat.completion" and done["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": text(7), "refusal": None}
    assert done["choices"][0] == {
        "index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip
    chunks = await stream(app, max_tokens=7)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text(7)
    assert chunks[-1]["choices"][0]["delta"] == {} and chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_without_a_limit_the_answer_may_fill_the_context(app: Any) -> None:
    done = await chat(app)
    assert done["usage"]["total_tokens"] == 512 and done["choices"][0]["finish_reason"] == "length"


LONG = [
    {"role": "system", "content": "Be brief."},
    *(
        {"role": role, "content": f"{role} {number} " + "x" * 20}
        for number in range(20)
        for role in ("user", "assistant")
    ),
    {"role": "user", "content": "And now?"},
]


async def test_a_conversation_longer_than_the_context_is_cut_where_that_is_wanted(app: Any) -> None:
    """Truncation is off by default, as in the Responses API; the answer counts the turns that were left out."""
    refused = await post(app, "/v1/chat/completions", {"messages": LONG, "max_tokens": 4})
    assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"
    refused = await post(app, "/v1/chat/completions", {"messages": LONG, "truncation": "disabled"})
    assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"
    done = await chat(app, LONG, max_tokens=4, truncation="auto", return_token_ids=True)
    turns = done["left_out"]["turns"]
    assert done["left_out"] == {"turns": turns, "messages": 2 * turns, "first": 1} and turns > 5
    shown = bytes(done["prompt_token_ids"]).decode()
    assert shown == "".join(f"<{m['role']}>{m['content']}\n" for m in [LONG[0], *LONG[1 + 2 * turns :]]) + "<assistant>"
    pinned = [LONG[0], {**LONG[1], "pinned": True}, *LONG[2:]]
    assert "user 0 " in await prompt(app, pinned, truncation="auto") and "user 1 " not in shown
    body = {"messages": LONG, "temperature": 0, "max_tokens": 4, "truncation": "auto", "stream": True}
    answer = await post(app, "/v1/chat/completions", body)
    with_count = [chunk for chunk in answer.events[:-1] if "left_out" in chunk]
    assert [chunk["left_out"] for chunk in with_count] == [done["left_out"]] and with_count[0] == answer.events[0]
    short = await chat(app, max_tokens=4, truncation="auto")
    assert "left_out" not in short
    wrong = await post(app, "/v1/chat/completions", {"messages": HELLO, "truncation": "middle"})
    assert wrong.status == 400 and wrong.error["param"] == "truncation"


async def test_several_choices(app: Any) -> None:
    done = await chat(app, n=3, max_tokens=5, temperature=1, seed=3)
    texts = [choice["message"]["content"] for choice in done["choices"]]
    assert len(set(texts)) == 3
    found = ["", "", ""]
    for chunk in await stream(app, n=3, max_tokens=5, temperature=1, seed=3):
        for choice in chunk["choices"]:
            found[choice["index"]] += choice["delta"].get("content", "")
    assert found == texts


async def test_logprobs_with_bytes(app: Any) -> None:
    done = await chat(app, max_tokens=2, logprobs=True, top_logprobs=1)
    content = done["choices"][0]["logprobs"]["content"]
    first = text(2)[0]
    assert content[0]["token"] == first and content[0]["bytes"] == [ord(first)] and content[0]["logprob"] == -1.0
    assert len(content) == 2 and len(content[0]["top_logprobs"]) == 1
    chunks = await stream(app, max_tokens=2, logprobs=True)
    scored = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [one["content"][0]["top_logprobs"] for one in scored] == [[], []]
    refused = await post(app, "/v1/chat/completions", {"messages": HELLO, "top_logprobs": 2})
    assert refused.status == 400 and refused.error["param"] == "top_logprobs"


async def test_messages_reach_the_template_as_it_wants_them(app: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert await prompt(app, [{"role": "user", "content": parts}]) == "<user>a\nb\n<assistant>"
    newer = [{"role": "developer", "content": "Be brief"}, *HELLO]
    assert await prompt(app, newer) == "<system>Be brief\n" + RENDERED
    assert await prompt(app, add_generation_prompt=False) == "<user>Hello\n"
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    assert await prompt(app, begun, continue_final_message=True) == "<user>Hello\n<assistant>I am"
    done = await chat(app, begun, continue_final_message=True, echo=True, max_tokens=2)
    assert done["choices"][0]["message"]["content"].startswith("I am")
    assert await prompt(app, chat_template_kwargs={"enable_thinking": True}) == RENDERED + "[thinking True]"
    assert await prompt(app, reasoning_effort="none") == RENDERED + "[thinking False]"
    assert await prompt(app, reasoning_effort="high") == RENDERED + "[thinking True]"
    both = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert await prompt(app, **both) == RENDERED + "[thinking True]"


async def test_variables_of_a_template_may_have_any_name(app: Any) -> None:
    """Those of the functions that take them were an untyped error: `self`, or one that an effort stands for, too."""
    names = ("self", "code", "scope", "loop", "range", "caller", "if", "", "\0", "add_generation_prompt ", "bos_token")
    assert await prompt(app, chat_template_kwargs=dict.fromkeys(names, 1)) == RENDERED


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ({"messages": HELLO, "temperature": -1}, "temperature"),
        ({"messages": HELLO, "temperature": 9}, "temperature"),
        ({"messages": HELLO, "top_p": 0}, "top_p"),
        ({"messages": HELLO, "functions": [{}]}, "functions"),
        ({"messages": HELLO, "modalities": ["audio"]}, "modalities"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ({"messages": HELLO, "response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"messages": HELLO, "structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"messages": HELLO, "structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"messages": HELLO, "structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": HELLO, "priority": 3}, "priority"),
        ({"messages": HELLO, "logit_bias": {"999": 1}}, "logit_bias"),
        ({"messages": HELLO, "cache_salt": ""}, "cache_salt"),
        ({"messages": HELLO, "min_tokens": 9, "max_completion_tokens": 3}, "min_tokens"),
        ({"messages": HELLO, "stop": ["a" * 3000]}, "stop"),
    ],
)
async def test_errors_name_the_clients_field(app: Any, body: Any, param: str) -> None:
    answer = await post(app, "/v1/chat/completions", body)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param, answer.error


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "store": False, "modalities": ["text"]},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "n": None, "audio": None},
        {"frequency_penalty": 0, "top_k": -1, "functions": None, "verbosity": "low", "safety_identifier": "x"},
        {"never_heard_of": 1},
        {"store": True, "top_logprobs": 0, "logprobs": False},
    ],
)
async def test_what_asks_for_nothing_changes_nothing(app: Any, harmless: Any) -> None:
    assert (await chat(app, max_tokens=3, **harmless))["choices"][0]["message"]["content"] == text(3)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {}, "messages is missing. Add it"),
        ("/v1/chat/completions", {"messages": []}, "messages=[]: is empty. Add one"),
        ("/v1/chat/completions", {"messages": [{"content": "Hi"}]}, "messages[0].role is missing. Add it"),
        (
            "/v1/completions",
            {"prompt": "x", "priority": 3},
            "priority=3: means nothing with the server's policy 'fcfs'. Remove it, or start the server with the policy "
            '"priority"',
        ),
        (
            "/v1/completions",
            {"prompt": "x", "stop": [""]},
            "stop=['']: holds something other than non-empty strings. Remove it",
        ),
        ("/detokenize", {"tokens": [72, 5_000]}, "tokens=5000: is not a token id of this model. Use ids from 0 to 256"),
        ("/abort", {}, "request_id is missing. Send request_id or request_ids"),
    ],
)
async def test_what_a_client_reads_that_sends_something_wrong(app: Any, path: str, body: Any, message: str) -> None:
    answer = await post(app, path, body)
    assert (answer.status, answer.error["message"]) == (400, message)


async def test_the_wrong_method_is_told_the_right_one(app: Any) -> None:
    answer = await get(app, "/v1/completions")
    assert answer.status == 405 and answer.error["message"].endswith("Use POST")
    assert (await post(app, "/health", {})).error["message"].endswith("Use GET")


async def test_a_schema_as_text_is_bounded_before_it_is_read(app: Any) -> None:
    """JSON inside a string is not counted with the values of the body: 30 MB of it became ten million lists."""
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": "[" + "[]," * 200_000 + "[]]"}}
    for fields in ({"response_format": format}, {"structured_outputs": {"json": format["json_schema"]["schema"]}}):
        answer = await post(app, "/v1/chat/completions", {"messages": HELLO, **fields})
        assert answer.status == 400 and "has 600,004 characters, more than 524,288" in answer.error["message"]


async def test_a_schema_without_the_extra_names_the_field(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle._src.structured.spec.importlib.util.find_spec", lambda name: None)
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    answer = await post(app, "/v1/chat/completions", {"messages": HELLO, "response_format": format})
    assert answer.status == 400 and "rekindle[structured]" in answer.error["message"]
    assert answer.error["param"] == "response_format.json_schema.schema"
