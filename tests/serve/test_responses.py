"""/v1/responses: items in, items out, the same as a stream of events; what would have to be kept is refused."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.asgi import post
from helpers.sessions import change_front, expected
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle._src.core.records import FinishReason, TextDelta
from rekindle._src.core.reply import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStarted
from rekindle._src.serve.errors import ApiError
from rekindle._src.serve.exchange import KeptItems
from rekindle.serve import app as rekindle_app
from serve.replies import completion, exchange_for, no_pictures, sent

pytestmark = pytest.mark.anyio
LOGPROBS = ["message.output_text.logprobs"]
RENDERED = "<system>Be brief\n<user>Hello\n<assistant>"


def body(**more: Any) -> dict[str, Any]:
    return {"input": "Hello", "instructions": "Be brief", "max_output_tokens": 6, "temperature": 0, **more}


async def test_an_answer_and_its_events(app: Any) -> None:
    text = bytes(expected(RENDERED, max_tokens=6)).decode()
    done = (await post(app, "/v1/responses", body())).json()
    assert done["object"] == "response" and done["status"] == "incomplete" and done["store"] is True
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
    # It is written up to three times, each at once: a million numbers held up all other streams.
    for large in ({"a": [[1.5] * 70_000]}, {"a" * 70_000: 1}, {"a": "x" * 70_000}, {"a": {"b": [{}] * 70_000}}):
        refused = await post(app, "/v1/responses", body(metadata=large))
        assert refused.status == 400 and "has more than 65,536 characters. Send less" in refused.body.decode()


@pytest.mark.parametrize(
    "large", [[[1.5] * 50_000], [10**900] * 4_000, [[[]] * 450_000, "x" * 600_000], ["x" * (1 << 20)]], ids=len
)
async def test_of_tools_and_formats_no_more_comes_back_than_is_written_at_once(app: Any, large: Any) -> None:
    """Members that nothing reads came back three times, each in one go: a million numbers stopped all for 0.4 s."""
    tool = {"type": "function", "name": "f", "x": large}
    for fields in ({"tools": [tool]}, {"tool_choice": tool}, {"text": {"format": {"type": "text"}, "x": large}}):
        refused = await post(app, "/v1/responses", body(**fields, stream=True))
        assert refused.status == 400 and refused.error["param"] == next(iter(fields))
        assert "has more than 1,048,576 characters. Send less" in refused.error["message"]
    schema = {"type": "object", "properties": {"a": {"enum": ["x" * 1_000] * 300}}}
    kept = await post(app, "/v1/responses", body(text={"format": {"type": "text"}, "x": schema}))
    assert kept.status == 200 and kept.json()["text"]["x"] == schema


async def test_conversations_become_messages(app: Any) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "What is the weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "message", "role": "developer", "content": "Be nice"},
    ]
    from rekindle._src.serve.responses import messages_of

    found = messages_of({"input": items}, no_pictures)
    assert [one["role"] for one in found] == ["user", "assistant", "tool", "developer"]
    assert found[1]["reasoning_content"] == "I look" and found[1]["tool_calls"][0]["id"] == "c1"
    assert (await post(app, "/v1/responses", body(input=items))).status == 200


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "always"}, "truncation"),
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


async def second_turn(app: Any, item: Any, **options: Any) -> Any:
    question = {"role": "user", "content": "And then?"}
    return await post(app, "/v1/responses", body(input=["Hello", item, question][1:], **options))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_second_turn_names_items_of_the_first_answer(app: Any, stream: bool) -> None:
    answer = await post(app, "/v1/responses", body(stream=stream, top_logprobs=1, include=LOGPROBS, truncation="auto"))
    done = answer.events[-1]["response"] if stream else answer.json()
    (item,) = done["output"]
    assert len(item["content"][0]["logprobs"]) == 6
    named = await second_turn(app, {"type": "item_reference", "id": item["id"]})
    sent = await second_turn(app, {"role": "assistant", "content": item["content"][0]["text"]})
    assert named.status == sent.status == 200
    assert named.json()["usage"]["input_tokens"] == sent.json()["usage"]["input_tokens"]
    assert named.json()["output"][0]["content"] == sent.json()["output"][0]["content"]


async def test_items_are_kept_for_their_sender_alone_and_not_with_store_false(session: Any) -> None:
    served = rekindle_app(session, api_key=["one", "two"])
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    for store, sender, status in ((True, one, 200), (True, two, 404), (False, one, 404)):
        done = (await post(served, "/v1/responses", body(store=store), headers=one)).json()
        assert done["store"] is store
        reference = {"type": "item_reference", "id": done["output"][0]["id"]}
        answer = await post(served, "/v1/responses", body(input=[reference]), headers=sender)
        assert answer.status == status
        if status == 404:
            assert answer.error["param"] == "input[0].id" and "store: false" in answer.error["message"]


async def test_without_keys_items_are_kept_by_address(app: Any) -> None:
    """A stranger can't name another's items, were their ids known, nor push them out with its own."""
    done = (await post(app, "/v1/responses", body())).json()
    reference = {"type": "item_reference", "id": done["output"][0]["id"]}
    for address, status in (("192.0.2.1", 404), ("127.0.0.1", 200)):
        answer = await post(app, "/v1/responses", body(input=[reference]), address=address)
        assert answer.status == status


def test_kept_items_are_bounded() -> None:
    def item(name: str, text: str) -> dict[str, Any]:
        return {"id": name, "type": "message", "content": [{"type": "output_text", "text": text, "logprobs": [1]}]}

    kept = KeptItems(most_items=3, most_characters=100)
    for index in range(5):
        kept.keep("", [item(str(index), "a")])
    assert kept.get("", "4", "input[0].id")["content"] == [{"type": "output_text", "text": "a"}]
    with pytest.raises(ApiError, match="'1' is not found"):
        kept.get("", "1", "input[0].id")
    kept.keep("", [item("long", "a" * 98)])
    with pytest.raises(ApiError):
        kept.get("", "4", "input[0].id")
    kept.keep("", [item("longer", "a" * 200)])
    assert kept.characters == 0
    kept.keep("", [item("same", "a")])
    kept.keep("", [item("same", "aa")])
    assert kept.characters == len("same") + 2, "an id counts once"
    kept.keep("", [item("longest", "a" * 200)])

    for address in map(str, range(9)):
        kept.keep(address, [])
        kept.keep(address, [item("too long", "a" * 200)])
    assert not kept._items and not kept._characters, "callers without items are forgotten"
    for index in range(3):
        kept.keep("one", [item(f"one {index}", "a")])
    for index in range(9):
        kept.keep("two", [item(f"two {index}", "a" * 20)])
    assert kept.get("one", "one 2", "input[0].id"), "who sends a lot does not push out what others have"
    assert kept.get("two", "two 8", "input[0].id")
    kept.keep("two", [item("longer", "a" * 200)])
    assert kept.get("one", "one 2", "input[0].id")
    with pytest.raises(ApiError):
        kept.get("two", "longer", "input[0].id")


async def test_allowed_tools_and_parameters_that_are_null(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is shown the allowed ones; `mode` is the choice among them."""
    seen: list[Any] = []

    def chat(self: Any, messages: Any, **options: Any) -> Any:
        seen.append((options.get("tools"), options.get("tool_choice")))
        return self.generate("x", max_tokens=1)

    monkeypatch.setattr(type(app.state.rekindle.models.get(None).session), "chat", chat)
    tools = [{"type": "function", "name": name, "parameters": None, "strict": None} for name in ("a", "b")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}
    assert (await post(app, "/v1/responses", body(tools=tools, tool_choice=choice))).status == 200
    tools = [{"type": "function", "function": {"name": name, "parameters": None}} for name in ("a", "b")]
    inner = {"mode": "required", "tools": [{"type": "function", "function": {"name": "b"}}]}
    request = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    choice = {"type": "allowed_tools", "allowed_tools": inner}
    assert (await post(app, "/v1/chat/completions", {**request, "tool_choice": choice})).status == 200
    assert seen == [([{"type": "function", "function": {"name": "b"}}], "required")] * 2
    for wrong, param in (
        ({**inner, "mode": "none"}, "tool_choice.allowed_tools.mode"),
        ({**inner, "tools": [{"type": "function", "function": {"name": "c"}}]}, "tool_choice.allowed_tools.tools[0]"),
        ({**inner, "tools": 3}, "tool_choice.allowed_tools.tools"),
    ):
        given = {**request, "tool_choice": {"type": "allowed_tools", "allowed_tools": wrong}}
        refused = await post(app, "/v1/chat/completions", given)
        assert refused.status == 400 and refused.error["param"] == param


async def test_an_effort_that_the_template_does_not_know_changes_nothing(session: Any) -> None:
    from rekindle._src.text.chat import ChatTemplate

    change_front(session, chat=ChatTemplate("{{ messages[0].content }}"))
    served = rekindle_app(session)
    request = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0}
    plain, tried = [
        await post(served, "/v1/chat/completions", {**request, **more}) for more in ({}, {"reasoning_effort": "high"})
    ]
    assert plain.status == tried.status == 200 and plain.json()["choices"] == tried.json()["choices"]


async def test_a_prompt_that_is_too_long_is_said_in_words_that_clients_know(app: Any) -> None:
    """LiteLLM raises its ContextWindowExceededError by them."""
    for path, given in (("/v1/completions", {"prompt": "a" * 600}), ("/v1/responses", {"input": "a" * 600})):
        refused = await post(app, path, given)
        assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"
        assert "this model's maximum context length is" in refused.error["message"].lower()


async def test_what_a_remote_tokenizer_asks_for(app: Any) -> None:
    """The calls of lm_eval's `RemoteTokenizer`."""
    from helpers.asgi import get

    info = (await get(app, "/tokenizer_info")).json()
    assert info["eos_token"] is None or isinstance(info["eos_token"], str)
    assert "messages" in info["chat_template"] and info["model_max_length"] == 512
    ids = (await post(app, "/tokenize", {"prompt": "test", "add_special_tokens": False})).json()["tokens"]
    assert (await post(app, "/detokenize", {"tokens": ids})).json()["prompt"] == "test"
