"""Chats whose replies call tools and reason: the same parts in replies, handles and streams."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from helpers.chatting import HERMES, MISTRAL, OPENED, saying, with_special_tokens
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Completion, ToolCall, ToolCallArguments, ToolCallDropped, ToolCallStarted
from rekindle._src.core.reply import fold
from rekindle._src.text.replies import ReplyFormat
from rekindle._src.text.replies.families import SYNTAXES
from rekindle._src.text.template_code import parsed
from rekindle.errors import InvalidRequest

anyio_test = pytest.mark.anyio
USER = [{"role": "user", "content": "Is it cold in Paris?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def weather(city: str, days: int = 1) -> str:
    """The weather forecast.

    Args:
        city: where.
    """
    return f"{days} days of rain in {city}"


@anyio_test
async def test_a_reply_has_its_parts() -> None:
    with saying(f"<think>\nI should look.\n</think>\n\nOne moment.\n{CALL}") as session:
        reply = await session.chat(USER, tools=[weather])
        assert (reply.content, reply.reasoning) == ("One moment.", "I should look.")
        (call,) = reply.tool_calls
        assert (call.name, call.arguments, call.arguments_text) == ("weather", {"city": "Paris"}, '{"city": "Paris"}')
        assert call.id.startswith("call_")
        assert reply.text.endswith("</tool_call>"), "the text is everything that the model wrote"
        assert '"description": "The weather forecast."' in (reply.prompt or "")
        assert '"city": {"type": "string", "description": "where."}' in (reply.prompt or "")
        assert reply.message == {
            "role": "assistant",
            "content": "One moment.",
            "reasoning_content": "I should look.",
            "tool_calls": [
                {"id": call.id, "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
            ],
        }
        assert pickle.loads(pickle.dumps(reply)) == reply


@anyio_test
async def test_a_stream_can_tell_calls_while_they_are_written() -> None:
    with saying(f"<think>Hm.</think>Wait. {CALL}") as session:
        whole = await session.chat(USER, tools=[weather], seed=5)
        handle = session.chat(USER, tools=[weather], seed=5, stream_tool_calls=True)
        deltas = [delta async for delta in handle]
        events = [event for delta in deltas for event in delta.events or ()]
        started = next(event for event in events if isinstance(event, ToolCallStarted))
        pieces = [event.text for event in events if isinstance(event, ToolCallArguments)]
        assert (started.name, "".join(pieces)) == ("weather", '{"city": "Paris"}') and len(pieces) == len(
            "".join(pieces)
        )
        assert fold(events) == (await handle).reply == whole.reply
        cut = session.chat(USER, tools=[weather], stream_tool_calls=True, max_tokens=len(whole.text) - 20)
        events = [event async for delta in cut for event in delta.events or ()]
        assert isinstance(events[-1], ToolCallDropped) and events[-1].text.lstrip().startswith("<tool_call>")
        done = await cut
        assert done.content.startswith("Wait.") and done.content.endswith(events[-1].text) and not done.tool_calls
        assert "".join([delta.content for delta in cut.deltas]) == done.content


@anyio_test
async def test_streams_and_handles_have_the_same_parts() -> None:
    with saying(f"<think>Hm.</think>Wait. {CALL}") as session:
        whole = await session.chat(USER, tools=[weather], seed=5)
        handle = session.chat(USER, tools=[weather], seed=5)
        deltas = [delta async for delta in handle]
        assert "".join(delta.text for delta in deltas) == whole.text
        assert "".join(delta.content for delta in deltas) == whole.content == handle.content == "Wait."
        assert "".join(delta.reasoning for delta in deltas) == whole.reasoning == handle.reasoning == "Hm."
        calls = tuple(call for delta in deltas for call in delta.tool_calls)
        assert calls == whole.tool_calls == handle.tool_calls
        assert fold(event for delta in deltas for event in delta.events or ()) == whole.reply
        assert await handle == whole or (await handle).reply == whole.reply


@anyio_test
async def test_ids_of_calls_are_unique_and_repeat_with_the_seed() -> None:
    with saying(CALL + CALL) as session:
        first = await session.chat(USER, tools=[weather], seed=1)
        again = await session.chat(USER, tools=[weather], seed=1)
        other = await session.chat(USER, tools=[weather], seed=2)
        several = await session.chat(USER, tools=[weather], n=3, seed=7)
        ids = [[call.id for call in reply.tool_calls] for reply in (first, again, other, *several)]
        assert ids[0] == ids[1]
        assert len({one for found in ids for one in found}) == 10


@anyio_test
async def test_text_without_tools_or_reasoning_is_left_alone() -> None:
    with saying(f" {CALL} ") as session:
        reply = await session.chat(USER)
        assert reply.content == reply.text == f" {CALL} " and reply.tool_calls == ()
        reply = await session.chat(USER, tools=[weather], tool_choice="none")
        assert reply.content == f" {CALL} " and "weather" not in (reply.prompt or "")
        plain = await session.generate("x")
        assert plain.reply is None and plain.content == plain.text and plain.reasoning == "" and plain.tool_calls == ()
        assert (await session.chat(USER, template="{{ messages[0].content }}")).reply is None


@anyio_test
async def test_reasoning_that_the_template_opens_or_switches_off() -> None:
    with saying("Hm.\n</think>\n\nYes.", OPENED) as session:
        reply = await session.chat(USER)
        assert (reply.reasoning, reply.content) == ("Hm.", "Yes.")
    with saying("Yes.", OPENED) as session:
        reply = await session.chat(USER)
        assert (reply.reasoning, reply.content) == ("Yes.", ""), "it was cut before its answer"
        for options in ({"template_options": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
            reply = await session.chat(USER, **options)  # type: ignore[call-overload]
            assert (reply.reasoning, reply.content) == ("", "Yes."), options
            assert (reply.prompt or "").endswith("<think>\n\n</think>\n\n")
        for wrong in ({"tools": []}, {"messages": []}, {"template": ""}, {1: 2}, [1]):
            with pytest.raises(InvalidRequest, match="template_options="):
                session.chat(USER, template_options=wrong)  # type: ignore[arg-type]


@anyio_test
async def test_a_continued_message_may_end_inside_of_its_reasoning() -> None:
    with saying(" more</think>Yes.") as session:
        begun = [*USER, {"role": "assistant", "content": "<think>Some"}]
        reply = await session.chat(begun, continue_final_message=True)
        assert (reply.reasoning, reply.content) == ("more", "Yes.")
    with saying("<think> is a tag.") as session:
        begun = [*USER, {"role": "assistant", "content": "The word "}]
        reply = await session.chat(begun, continue_final_message=True)
        assert (reply.reasoning, reply.content) == ("", "<think> is a tag.")


@anyio_test
async def test_markers_that_are_special_tokens_are_seen_where_they_are_asked_for() -> None:
    tokenizer = with_special_tokens("[TOOL_CALLS]", "[ARGS]", "[OTHER]")
    with saying('Hm[OTHER].[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', MISTRAL, tokenizer=tokenizer) as session:
        reply = await session.chat(USER, tools=[weather])
        assert reply.content == "Hm."
        assert [(call.name, call.arguments) for call in reply.tool_calls] == [("weather", {"city": "Rome"})]
        assert len(reply.tool_calls[0].id) == 9, "the template insists on it"
        again = await session.chat([*USER, reply.message, reply.tool_calls[0].answer("rain")], tools=[weather])
        assert again.tool_calls
        assert (await session.chat(USER)).text == 'Hm.weather{"city": "Rome"}', "plain text is as it was"


@anyio_test
async def test_arguments_as_text_are_shown_to_the_template_as_an_object() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    with saying("Rain.") as session:
        messages: list[dict[str, Any]] = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ]
        reply = await session.chat(messages, tools=[weather])
        assert '{"name": "weather", "arguments": {"city": "Rome"}}' in (reply.prompt or "")
        assert reply.content == "Rain."
        call["function"]["arguments"] = "{oops"  # type: ignore[index]
        assert "{oops" in ((await session.chat(messages, tools=[weather])).prompt or "")


# In the manner of SmolLM3's and Phi-4-mini's, which take tools in ways of their own and leave calls out.
SMOL = (
    "{% if xml_tools %}<tools>{{ xml_tools | tojson }}</tools> Answer within <tool_call></tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
PHI = (
    "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m %}"
    "{{ '<system>' + m['content'] + '<|tool|>' + m['tools'] + '<|/tool|>' }}"
    "{% else %}{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}{% endfor %}"
)


@anyio_test
@pytest.mark.parametrize(
    ("template", "said"),
    [(SMOL, CALL), (PHI, '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]<|/tool_call|>')],
    ids=["SmolLM3", "Phi-4-mini"],
)
async def test_templates_that_take_tools_in_ways_of_their_own(template: str, said: str) -> None:
    with saying(said, template) as session:
        reply = await session.chat(USER, tools=[weather])
        (call,) = reply.tool_calls
        assert call.name == "weather" and '[{"name": "weather", "description": "The weather' in (reply.prompt or "")
        system = [{"role": "system", "content": "Be brief."}, *USER]
        again = await session.chat([*system, reply.message, call.answer("rain")], tools=[weather])
        assert f"<assistant>{said}<tool>rain" in (again.prompt or ""), "the calls are not left out"
        assert (again.prompt or "").count("Be brief.") == 1


@anyio_test
async def test_what_the_template_does_not_read_is_refused() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with saying("Hi", plain) as session:
        for field, options in (
            ("tools", {"tools": [weather]}),
            ("documents", {"documents": [{"title": "a", "text": "b"}]}),
            ("reasoning_effort", {"reasoning_effort": "high"}),
        ):
            with pytest.raises(InvalidRequest, match=r"is nothing that the model's chat template reads") as refused:
                session.chat(USER, **options)  # type: ignore[call-overload]
            assert refused.value.field == field
        known = "{{ messages[0].content }} {{ reasoning_effort }} {% for d in documents %}{{ d.title }}{% endfor %}"
        reply = await session.chat(USER, template=known, reasoning_effort="high", documents=[{"title": "Moon"}])
        assert reply.prompt == "Is it cold in Paris? high Moon"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tools": "weather"}, "is not a list of tools"),
        ({"tools": [3]}, "is neither a function nor a dict"),
        ({"tools": [{"type": "function"}]}, "has no name"),
        ({"tools": [{"name": "a", "parameters": 3}]}, "has parameters that are no JSON schema"),
        ({"tools": [weather, weather]}, "is the name of two tools"),
        ({"tools": [lambda: 1]}, "has no name that a model can call"),
        ({"tools": [weather], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [weather], "run_tools": True, "max_rounds": 0}, "is not a number of rounds"),
        ({"tools": [weather], "run_tools": True, "n": 2}, "can't be combined with run_tools"),
        ({"tools": [{"name": "a"}], "run_tools": True}, "needs functions"),
        ({"run_tools": True}, "needs tools"),
    ],
)
def test_wrong_tools_are_refused_before_anything_runs(options: dict[str, Any], problem: str) -> None:
    with saying("Hi") as session, pytest.raises(InvalidRequest, match=problem):
        session.chat(USER, **options)


def test_a_completion_shows_calls_and_folds_its_reasoning_away() -> None:
    evil = "<b>bold</b>"
    script = (
        f'<think>{evil}</think>{evil}<tool_call>{{"name": "weather", "arguments": {{"city": "{evil}"}}}}</tool_call>'
    )
    with saying(script) as session:
        reply: Completion = session.chat(USER, tools=[weather]).result_sync()
        shown = reply._repr_html_()
        assert "<details" in shown and "reasoning" in shown and evil not in shown
        assert "Call of weather" in shown and "&lt;b&gt;bold&lt;/b&gt;</code>" in shown
        assert "1 tool call, " in repr(reply)
        call = reply.tool_calls[0]
        assert isinstance(call, ToolCall) and str(call) == f"weather(city='{evil}')" and "weather" in repr(call)


@pytest.mark.parametrize(
    ("template", "name", "reasons"),
    [
        (HERMES, "hermes", True),
        (OPENED, "hermes", True),
        (SMOL, "hermes", False),
        (PHI, "phi4mini", False),
        (MISTRAL, "mistral", False),
        ('{{ tools }} as {"name": function name, "parameters": dictionary of arguments}', "llama3_json", False),
        ("{{ tools }} as [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic", False),
        ("{{ tools }} inside <function_calls></function_calls>", "olmo", False),
        ("{{ tools }}<|start|>assistant<|channel|>final<|message|>", "harmony", False),
        ("{{ tools }}{{ content.split('</think>')[-1] }}", "hermes", True),
        ("{{ messages }} no tools", None, False),
        ("{{ messages }}[THINK]x[/THINK]", None, True),
    ],
)
def test_the_format_is_found_in_the_template(template: str, name: str | None, reasons: bool) -> None:
    found = ReplyFormat.of_template(parsed(template))
    assert (None if found.calls is None else found.calls.name) == name
    assert (found.reasoning is not None) == reasons


@pytest.mark.parametrize("family", sorted(SYNTAXES))
def test_calls_that_are_written_as_text_are_read_again(family: str) -> None:
    calls = [("weather", {"city": "a]b", "days": None}), ("now", {})]
    text = SYNTAXES[family].write(calls)
    tools = [{"name": "weather", "parameters": {}}, {"name": "now"}]
    reply = ReplyFormat(SYNTAXES[family]).parse(text, tools=tools)
    assert reply.content == "" and [(call.name, call.arguments) for call in reply.tool_calls] == calls
