"""What published parsers of replies got wrong. Each test names the report; all of them are read in every split."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from helpers.replies import THINK, TOOLS, said
from rekindle._src.text.replies import ContentDelta, ReasoningDelta, Reply, ReplyFormat, ToolCallStarted, fold
from rekindle._src.text.replies.families import SYNTAXES


def read(family: str, text: str, *, opened: bool = False) -> Reply:
    """The reply, which is the same in one piece, in characters, and in random pieces."""
    format = ReplyFormat(SYNTAXES[family], THINK)
    whole = format.parse(text, tools=TOOLS, reasoning_open=opened, seed=b"x")
    chance = random.Random(0)
    for splits in ([*range(len(text))], *(sorted(chance.choices(range(len(text) + 1), k=4)) for _ in range(30))):
        scanner = format.scanner(tools=TOOLS, reasoning_open=opened, seed=b"x")
        pieces = [text[start:end] for start, end in itertools.pairwise([0, *splits, len(text)])]
        assert fold([*(event for piece in pieces for event in scanner.feed(piece)), *scanner.finish()]) == whole
    return whole


def tagged(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def calls(reply: Reply) -> list[tuple[str, dict[str, Any]]]:
    return said(reply)[2]


@pytest.mark.parametrize("text", ["a </tool_call> b", "{[", "}]", '"quoted" \\ {"', "<tool_call>", "]"])
def test_markers_and_brackets_inside_of_strings(text: str) -> None:
    """Upstream: vllm 45167, ollama 16937, sglang 38869: the end was looked for as text, also within strings."""
    assert calls(read("hermes", tagged("write", text=text))) == [("write", {"text": text})]
    assert calls(read("llama3_json", json.dumps({"name": "write", "parameters": {"text": text}}))) == [
        ("write", {"text": text})
    ]
    assert calls(read("mistral", "[TOOL_CALLS]write[ARGS]" + json.dumps({"text": text}))) == [("write", {"text": text})]
    assert calls(read("pythonic", f"[write(text={text!r})]")) == [("write", {"text": text})]

    assert calls(read("olmo", f"<function_calls>write(text={text!r})</function_calls>")) == [("write", {"text": text})]


def test_a_call_without_arguments() -> None:
    """Upstream: vllm 28806 and sglang 35564: while streaming, empty arguments were dropped, or the call itself."""
    for family, text in (
        ("hermes", tagged("time") + tagged("time")),
        ("llama3_json", '{"name": "time", "parameters": {}}; {"name": "time", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS]time[ARGS]{}[TOOL_CALLS]time[ARGS]{}"),
        ("phi4mini", 'functools[{"name": "time", "arguments": {}}, {"name": "time", "arguments": {}}]'),
        ("pythonic", "[time(), time()]"),
        ("olmo", "<function_calls>time()\ntime()</function_calls>"),
    ):
        reply = read(family, text)
        assert [(call.name, call.arguments_text) for call in reply.tool_calls] == [("time", "{}")] * 2, family
        assert reply.content == ""


def test_several_calls_in_one_piece() -> None:
    """Upstream: sglang 37634 and 31915: of two calls that came at once, the second one lost its arguments."""
    text = tagged("weather", city="Paris") + tagged("weather", city="Rome", days=3)
    assert calls(read("hermes", text)) == [("weather", {"city": "Paris"}), ("weather", {"city": "Rome", "days": 3})]


def test_a_call_after_one_without_arguments_keeps_its_own() -> None:
    """Upstream: vllm 47901: after a call without arguments, those of the next one were dropped."""
    assert calls(read("hermes", tagged("time") + tagged("weather", city="Oslo")))[1] == ("weather", {"city": "Oslo"})


def test_lists_of_objects_in_arguments() -> None:
    """Upstream: vllm 21360, 10395 and 21046: `[{"` at once was discarded, and closing brackets came too early."""
    deep = {"numbers": [{"a": [1, {"b": []}]}, {}], "last": {}}
    assert calls(read("hermes", tagged("write", **deep))) == [("write", deep)]


def test_arguments_come_once() -> None:
    """Upstream: vllm 51697: the end of the stream sent them again."""
    scanner = ReplyFormat(SYNTAXES["hermes"]).scanner(tools=TOOLS)
    first = scanner.feed(tagged("weather", city="Paris").removesuffix("</tool_call>"))
    assert len(first) == 2 and scanner.feed("</tool") == scanner.finish() == [], "the rest of a tag is none"


def test_the_arguments_may_come_before_the_name() -> None:
    """Upstream: vllm 9693 and ollama 11505: such calls had no arguments, or were not read at all."""
    text = '<tool_call>{"arguments": {"city": "Rome"}, "name": "weather"}</tool_call>'
    assert calls(read("hermes", text)) == [("weather", {"city": "Rome"})]


def test_a_call_that_never_completes_leaves_no_orphan() -> None:
    """Upstream: sglang 32958: the name was sent as soon as it was there, and no arguments came."""
    text = tagged("weather", city="Paris")[:-20]
    scanner = ReplyFormat(SYNTAXES["hermes"]).scanner(tools=TOOLS)
    events = [*(event for character in text for event in scanner.feed(character)), *scanner.finish()]
    assert not any(isinstance(event, ToolCallStarted) for event in events)
    assert fold(events).content == text, "nor is anything lost"


def test_text_before_between_and_behind_calls_is_kept() -> None:
    """Upstream: sglang 32958, vllm 19024 and 22917: visible text around calls was dropped, or the calls were."""
    text = f"One.\n{tagged('time')}\nTwo.\n{tagged('time')}\nThree."
    reply = read("hermes", text)
    assert reply.content.split() == ["One.", "Two.", "Three."] and len(reply.tool_calls) == 2
    reply = read("llama3_json", '{"type": "function", "name": "time", "parameters": {}} \n\nAnything else?')
    assert (reply.content, len(reply.tool_calls)) == ("Anything else?", 1)
    reply = read("pythonic", "To find out:\n\n[time()]")
    assert (reply.content, len(reply.tool_calls)) == ("To find out:", 1)


def test_json_in_an_answer_is_no_call() -> None:
    """Upstream: llama.cpp 18183: example code in an answer became a call of a tool that does not exist."""
    text = 'Write:\n```json\n{"name": "weather", "arguments": {}}\n```'
    assert read("hermes", text) == Reply(text)
    text = '{"name": "someone", "parameters": {}}\n{"city": "Rome"}'
    assert read("llama3_json", text) == Reply(text)


def test_what_is_not_read_as_a_call_is_streamed() -> None:
    """Upstream: vllm 49028: with tools, no plain text came at all; sglang 8099: text that begins with `<` was kept."""
    scanner = ReplyFormat(SYNTAXES["phi4mini"], THINK).scanner(tools=TOOLS)
    assert scanner.feed("Hello") == [ContentDelta("Hello")]
    scanner = ReplyFormat(SYNTAXES["hermes"], THINK).scanner(tools=TOOLS)
    assert scanner.feed("<Direct") == [ContentDelta("<Direct")]


def test_both_notations_of_mistral() -> None:
    """Upstream: vllm 20028, 30651 and 11097: `name{…}` raised JSONDecodeError, parallel calls were not read."""
    both = [("weather", {"city": "Rome"}), ("time", {})]
    assert calls(read("mistral", '[TOOL_CALLS]weather{"city": "Rome"}[TOOL_CALLS]time{}')) == both
    array = '[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time", "arguments": {}}]'
    assert calls(read("mistral", f"[TOOL_CALLS] {array}")) == both


def test_the_end_of_a_list_of_calls_is_missing() -> None:
    """Upstream: vllm 30722: without the last bracket a SyntaxError, and the calls in the content."""
    assert calls(read("pythonic", '[weather(city="Rome"), write(text=["a", ["b"]])')) == [
        ("weather", {"city": "Rome"}),
        ("write", {"text": ["a", ["b"]]}),
    ]


def test_llama_4_writes_json_where_its_template_shows_python() -> None:
    """Upstream: vllm 46863 and 16214."""
    text = '{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}'
    assert calls(read("pythonic", text)) == [("weather", {"city": "Rome"})]
    assert calls(read("pythonic", f"<|python_start|>{text}<|python_end|>")) == [("weather", {"city": "Rome"})]


def test_types_of_xml_parameters_follow_the_schema() -> None:
    """Upstream: sglang 35564: a number became text; vllm 22975: calls without their outer tag were content."""
    inner = "<function=weather>\n<parameter=city>\n123\n</parameter>\n<parameter=days>\n123\n</parameter>\n</function>"
    for text in (f"<tool_call>\n{inner}\n</tool_call>", f"{inner}\n</tool_call>"):
        assert calls(read("hermes", text)) == [("weather", {"city": "123", "days": 123})]


def test_a_reply_without_tags_is_no_reasoning() -> None:
    """Upstream: vllm's qwen3 and deepseek_r1 parsers (LocalAI 11791, TensorRT-LLM 14502, sglang 20586).

    With reasoning switched off, or from a model that does none, the whole answer was reported as reasoning.
    """
    assert read("hermes", "391") == Reply("391")
    assert read("hermes", "391", opened=True) == Reply("", "391"), "the prompt had opened the tag"


def test_a_tag_in_two_pieces_is_a_tag() -> None:
    """Upstream: sglang 31009, lmdeploy 4754: `</th` went out as reasoning, and the answer after it, too."""
    assert read("hermes", "<think>weighing it</think>Answer.") == Reply("Answer.", "weighing it")
    assert read("hermes", "a<b </thin", opened=True) == Reply("", "a<b </thin")


def test_tags_of_others_stay_in_the_text() -> None:
    """Upstream: sglang 8606: `<my-tag>` lost its first character."""
    assert read("hermes", "<my-tag>x</my-tag>") == Reply("<my-tag>x</my-tag>")


def test_whitespace_before_the_tag() -> None:
    """Upstream: sglang 35083: a space before `<think>` left the tag in the reasoning or in the content."""
    assert read("hermes", "\n <think>Hm.</think>\n\nYes.") == Reply("Yes.", "Hm.")


def test_the_line_breaks_after_reasoning_are_no_content() -> None:
    """Upstream: QwenLM/Qwen3 1755: two line breaks came as content before a call."""
    scanner = ReplyFormat(SYNTAXES["hermes"], THINK).scanner(tools=TOOLS, reasoning_open=True)
    events = [*scanner.feed("Hm.\n</think>\n\n" + tagged("time")), *scanner.finish()]
    assert events[0] == ReasoningDelta("Hm.") and isinstance(events[1], ToolCallStarted)


def test_calls_that_a_model_thinks_about_and_calls_that_it_makes_while_thinking() -> None:
    """Upstream: vllm 39056 and 42021: a call before a forgotten `</think>` was lost."""
    call = tagged("time")
    assert calls(read("hermes", f"<think>I need the time.\n{call}")) == [("time", {})]
    assert read("hermes", f"<think>I need the time.\n{call}").reasoning == "I need the time."
    thought = read("hermes", f"<think>I could say {call} but no.</think>Noon.")
    assert (thought.content, thought.tool_calls) == ("Noon.", ())
    assert call in thought.reasoning


def test_a_thinking_reply_may_repeat_the_tag_that_its_prompt_opened() -> None:
    """Upstream: vllm 22507 and 29408: parsers that expect the tag in the reply and those that don't were mixed up."""
    assert read("hermes", "<think>\nHm.</think>Yes.", opened=True) == read("hermes", "Hm.</think>Yes.", opened=True)
