"""Chats of models that reply in harmony, the format of gpt-oss: thoughts, calls and answers, whole and as they come."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.chatting import saying, with_special_tokens
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import ContentDelta, ReasoningDelta, ToolCallStarted
from rekindle._src.text.replies.families import HARMONY
from rekindle._src.text.template_code import parsed

anyio_test = pytest.mark.anyio
# Like the template of gpt-oss, which refuses thoughts together with content in a message with a call.
TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' and m.tool_calls %}"
    "{%- if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    "{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}"
    "<|call|>"
    "{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{%- if not loop.last or add_generation_prompt %}<|end|>{% endif %}"
    "{%- elif m.role == 'tool' %}<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant{% endif %}"
)
USER = [{"role": "user", "content": "Is it cold in Paris?"}]
THOUGHT = "<|channel|>analysis<|message|>I should look.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
PREAMBLE = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"


def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def script(prompt: str) -> str:
    if "rain in" in prompt:
        return "<|channel|>final<|message|>It rains."
    return THOUGHT + PREAMBLE + CALL if "weather" in prompt else THOUGHT + "<|channel|>final<|message|>Yes."


def session(said: Any = script) -> Any:
    return saying(said, TEMPLATE, tokenizer=with_special_tokens(*HARMONY.markers))


@anyio_test
async def test_a_reply_has_its_parts_without_markers() -> None:
    with session() as opened:
        reply = await opened.chat(USER)
        assert (reply.content, reply.reasoning, reply.tool_calls) == ("Yes.", "I should look.", ())
        events = [event async for delta in opened.chat(USER) for event in delta.events or ()]
        kinds = [type(event) for event in events]
        assert kinds == sorted(kinds, key=[ReasoningDelta, ContentDelta].index)
        assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == "Yes."


@anyio_test
async def test_a_round_with_a_tool() -> None:
    with session() as opened:
        reply = await opened.chat(USER, tools=[weather])
        (call,) = reply.tool_calls
        assert (reply.content, reply.reasoning) == ("One moment.", "I should look.")
        assert (call.name, call.arguments) == ("weather", {"city": "Paris"})
        run = await opened.chat(USER, tools=[weather], run_tools=True)
        assert run.rounds[-1].content == "It rains."
        prompt = run.rounds[-1].prompt or ""
        assert "analysis<|message|>I should look.<|end|>" in prompt and '<|message|>"rain in Paris"' in prompt
        handle = opened.chat(USER, tools=[weather], stream_tool_calls=True)
        events = [event async for delta in handle for event in delta.events or ()]
        assert any(isinstance(event, ToolCallStarted) and event.name == "weather" for event in events)


@anyio_test
async def test_a_reply_goes_on_with_a_message() -> None:
    with session(" and so on") as opened:
        messages = [*USER, {"role": "assistant", "content": "First"}]
        reply = await opened.chat(messages, continue_final_message=True)
        assert (reply.content, reply.reasoning) == (" and so on", "")
    with session(lambda prompt: "<|channel|>analysis<|message|>One two<|end|><|start|>assistant<|channel|>final"
                 "<|message|>Three") as opened:  # fmt: skip
        handle = opened.chat(USER)
        await handle
        forked = await opened.fork(handle, at=12)  # the model begins anew
        assert (forked.reasoning, forked.content) == ("One two", "Three")


def test_a_message_may_go_on_after_any_character() -> None:
    from rekindle._src.text.replies import ReplyFormat, ReplyPlan, fold

    plan = ReplyPlan(ReplyFormat.of_template(parsed(TEMPLATE)), ({"name": "weather", "parameters": {}},))
    text = THOUGHT + PREAMBLE + CALL
    for at in range(len(text) + 1):
        scanner = plan.after("", text[:at]).scanner("<|start|>assistant" + text[:at], b"", 1)
        reply = fold([*scanner.feed(text[at:]), *scanner.finish()])
        assert [call.arguments for call in reply.tool_calls] == [{"city": "Paris"}] or at == len(text), at
        assert "<|" not in reply.content + reply.reasoning
        assert "One moment.".endswith(reply.content) and "I should look.".endswith(reply.reasoning)
