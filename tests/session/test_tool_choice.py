"""`tool_choice`: "required" and a tool's name make a model call tools that was never trained to, in every syntax."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import rekindle
from helpers.chatting import HERMES, OPENED, saying
from helpers.small import TINY
from helpers.thorough import by_default
from rekindle import FinishReason, Session
from rekindle._src.text.chat import ChatTemplate
from rekindle.errors import InvalidRequest

pytest.importorskip("llguidance", reason="llguidance is not installed")
pytestmark = pytest.mark.usefixtures("large_steps")
USER = [{"role": "user", "content": "Who are you?"}]
# In each syntax a template that shows it, in our own words.
TEMPLATES = {
    "hermes": "{{ tools }}<tool_call>",
    "llama3_json": '{{ tools }}"parameters": dictionary',
    "pythonic": "{{ tools }}<|python_start|>",
    "mistral": "{{ tools }}[TOOL_CALLS]",
    "phi4mini": "{{ tools }}functools[",
    "olmo": "{{ tools }}<function_calls>",
    "harmony": "{{ tools }}<|channel|>",
}
BODY = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def paint(colour: Literal["red", "blue"], coats: Literal[1, 2] = 1) -> str:
    """Paint a ball."""
    return f"{colour} {coats}"


def stop() -> str:
    return "stopped"


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with rekindle.open_sync("tiny", **TINY) as made:
        yield made


@pytest.mark.parametrize("family", by_default(sorted(TEMPLATES)))
def test_a_model_that_has_to_call_calls(session: Session, family: str) -> None:
    template = f"{{% if false %}}{TEMPLATES[family]}{{% endif %}}{BODY}"
    options: dict[str, Any] = {"tools": [paint, stop], "template": template, "max_tokens": 200, "temperature": 1.0}
    for seed in range(2):
        reply = session.chat(USER, tool_choice="required", seed=seed, **options).result_sync()
        assert reply.tool_calls, reply.text
        assert reply.content == "" or reply.finish_reason == FinishReason.LENGTH, "it may be cut amid a further call"
    for seed in range(2):
        reply = session.chat(
            USER, tool_choice="required", parallel_tool_calls=False, seed=seed, **options
        ).result_sync()
        assert len(reply.tool_calls) == 1 and reply.content == "" and reply.finish_reason != FinishReason.LENGTH
    for choice in ("paint", paint, {"type": "function", "function": {"name": "paint"}}):
        reply = session.chat(USER, tool_choice=choice, seed=1, **options).result_sync()
        (call,) = reply.tool_calls
        assert call.name == "paint" and call.arguments["colour"] in ("red", "blue"), reply.text
        assert call.arguments.get("coats", 1) in (1, 2)


def test_a_call_is_forced_once(session: Session) -> None:
    template = f"{{% if false %}}{TEMPLATES['hermes']}{{% endif %}}{BODY}"
    run = session.chat(
        USER, tools=[paint], tool_choice="required", run_tools=True, template=template, max_tokens=120
    ).result_sync()
    assert run.rounds[0].tool_calls and len(run.rounds) == 2 and run.messages[2]["role"] == "tool"


def test_no_call_is_forced_inside_of_reasoning(session: Session) -> None:
    """A prompt that ends with the opening tag is gone on with as reasoning; one that ends with both tags calls."""
    thinking = "{% if false %}{{ tools }}<tool_call>{% endif %}" + BODY + "<think>{% if closed %}</think>{% endif %}"
    options: dict[str, Any] = {"tools": [paint], "tool_choice": "required", "template": thinking, "max_tokens": 200}
    reply = session.chat(USER, **{**options, "max_tokens": 10}).result_sync()
    assert reply.reasoning and not reply.content and not reply.tool_calls
    assert "tool_call" not in reply.text and reply.finish_reason == FinishReason.LENGTH
    reply = session.chat(USER, template_options={"closed": True}, **options).result_sync()
    assert reply.tool_calls and not reply.reasoning


@pytest.mark.parametrize("thought", ["", "so it is</think>"])
def test_a_complete_call_stays_one_wherever_the_next_one_is_cut(thought: str) -> None:
    call = '<tool_call>{"name": "paint", "arguments": {"colour": "red"}}</tool_call>'
    with saying(f"{thought}{call}\n{call}", OPENED) as session:
        for left in (len(call) - 2, len(call) - 9, len(call) - 11, len(call) - 30, 20):
            cut = len(thought) + 2 * len(call) + 1 - left
            reply = session.chat(USER, tools=[paint], max_tokens=cut).result_sync()
            assert reply.finish_reason == FinishReason.LENGTH
            assert ([one.name for one in reply.tool_calls], reply.reasoning) == (
                ["paint"],
                thought.removesuffix("</think>"),
            )
            assert call[: len(call) - left].startswith(reply.content.strip()), "nothing of the first call is left over"


def test_choices_that_make_no_sense() -> None:
    with saying("Hi", HERMES) as session:
        for options, problem in (
            ({"tool_choice": "required"}, "needs tools"),
            (
                {"tools": [paint], "tool_choice": "stop"},
                "names no tool. Use 'auto', 'none', 'required', or one of: paint",
            ),
            ({"tools": [paint], "tool_choice": {"name": "x"}}, "names no tool"),
            ({"tools": [paint], "tool_choice": "required", "regex": "a"}, "can't be combined with a schema or grammar"),
        ):
            with pytest.raises(InvalidRequest, match=problem) as refused:
                session.chat(USER, **options)  # type: ignore[call-overload]
            assert refused.value.field == "tool_choice"


def test_no_guessed_syntax_is_forced_where_a_response_template_reads(tmp_path: Path) -> None:
    """The template reads its own marks alone, and a forced `<tool_call>` would stay in the text."""
    call = {"open": "[call]", "close": "[/call]", "content": "json"}
    own = {"start_anchor": "user:", "fields": {"content": {}, "tool_calls": call}}
    config = {"chat_template": f"{{{{ tools }}}}{BODY}", "response_template": own}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    said = '[call]{"name": "stop", "arguments": {}}[/call]'
    chat = ChatTemplate.load(tmp_path)
    assert chat is not None
    with saying(said, chat) as session:
        reply = session.chat(USER, tools=[paint, stop]).result_sync()
        assert [one.name for one in reply.tool_calls] == ["stop"]
        for choice in ("required", "stop"):
            with pytest.raises(InvalidRequest, match=r"response_template\. Use 'auto', or .* reply_format=") as refused:
                session.chat(USER, tools=[paint, stop], tool_choice=choice)
            assert refused.value.field == "tool_choice"
