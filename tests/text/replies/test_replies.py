"""Replies of every family are read rightly, whatever the pieces in which they come; nothing is lost or taken back."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.replies import CONTENT, EXAMPLES, THINK, TOOLS, Example, said
from rekindle._src.text.replies import (
    ContentDelta,
    ReasoningDelta,
    ReplyEvent,
    ReplyFormat,
    ToolCallArguments,
    ToolCallDropped,
    ToolCallStarted,
    fold,
)
from rekindle._src.text.replies.families import SYNTAXES

FORMATS = {name: ReplyFormat.of_family(name) for name in SYNTAXES}
MARKS = sorted({mark for format in FORMATS.values() for mark in format.markers(tools=True)})
WHOLE = [*EXAMPLES, *(Example(family, text, text) for family, text in CONTENT)]


def events_of(
    format: ReplyFormat, pieces: Sequence[str], *, opened: bool = False, calls_in_pieces: bool = False
) -> list[ReplyEvent]:
    scanner = format.scanner(tools=TOOLS, reasoning_open=opened, seed=b"seed", pieces=calls_in_pieces)
    return [*(event for piece in pieces for event in scanner.feed(piece)), *scanner.finish()]


@pytest.mark.parametrize("example", WHOLE, ids=lambda example: f"{example.family}: {example.text[:40]!r}")
def test_every_example_is_read_as_it_is_meant(example: Example) -> None:
    reply = example.format.parse(example.text, tools=TOOLS, reasoning_open=example.opened)
    assert said(reply) == (example.content, example.reasoning, [*example.calls])
    for call in reply.tool_calls:
        assert json.loads(call.arguments_text) == call.arguments


@pytest.mark.parametrize("example", WHOLE, ids=lambda example: f"{example.family}: {example.text[:40]!r}")
def test_every_split_in_two_and_every_character_alone_give_the_same(example: Example) -> None:
    text = example.text
    whole = fold(events_of(example.format, [text], opened=example.opened))
    for at in range(len(text) + 1):
        assert fold(events_of(example.format, [text[:at], text[at:]], opened=example.opened)) == whole, at
    assert fold(events_of(example.format, list(text), opened=example.opened)) == whole


MARKED = [name for name, syntax in SYNTAXES.items() if syntax.openers and not any(one.bare for one in syntax.openers)]


@pytest.mark.parametrize("family", MARKED)
def test_a_call_that_is_cut_leaves_the_one_before_it_whole(family: str) -> None:
    """The prompt opens reasoning, the model forgets to close it, and `max_tokens` ends the second of its calls.

    The closing tag of the first one stayed in the content, or both were taken for reasoning.
    """
    (city, other), format = ({"city": "Rome"}, {"city": "Paris"}), FORMATS[family]
    first, second = (SYNTAXES[family].write([("weather", arguments)]) for arguments in (city, other))
    if format.reasoning is None:
        format = dataclasses.replace(format, reasoning=THINK)
    for stop in range(1, len(second)):
        events = events_of(format, [f"Hm.\n{first}\n{second[:stop]}"], opened=True)
        content, reasoning, calls = said(fold(events))
        assert (reasoning, calls[0]) == ("Hm.", ("weather", city)), stop
        assert second[:stop].startswith(content.strip()) and calls[1:] in ([], [("weather", other)]), stop
        if stop % 5 == 0:
            assert fold(events_of(format, [*f"Hm.\n{first}\n{second[:stop]}"], opened=True)) == fold(events)


@pytest.mark.parametrize("example", WHOLE, ids=lambda example: f"{example.family}: {example.text[:40]!r}")
def test_ranges_of_reasoning_hold_its_text(example: Example) -> None:
    text, found = example.text, []
    for size in (len(text) + 1, 1, 3):
        scanner = example.format.scanner(tools=TOOLS, reasoning_open=example.opened, seed=b"seed")
        for at in range(0, len(text), size):
            scanner.feed(text[at : at + size])
        scanner.finish()
        found.append(scanner.thoughts)
    assert found == found[:1] * 3
    inside = "".join(text[begin:end] for begin, end in found[0])
    assert "".join(inside.split()) == "".join(example.reasoning.split())


@pytest.mark.parametrize("example", WHOLE, ids=lambda example: f"{example.family}: {example.text[:40]!r}")
def test_calls_in_pieces_are_the_same_calls_in_every_split(example: Example) -> None:
    text, opened = example.text, example.opened
    cuts = ([text], list(text), *([text[:at], text[at:]] for at in range(len(text))))
    for pieces in cuts:
        events = events_of(example.format, pieces, opened=opened, calls_in_pieces=True)
        assert said(fold(events)) == (example.content, example.reasoning, [*example.calls]), pieces
        check_order(events)


def check_order(events: Sequence[ReplyEvent]) -> None:
    """A call starts, gets its arguments and is whole before anything else comes, or is dropped."""
    open_call: int | None = None
    arguments = ""
    for event in [*events, None]:
        if isinstance(event, ToolCallArguments):
            assert event.index == open_call and event.text
            arguments += event.text
        elif isinstance(event, ToolCallDropped):
            assert event.index == open_call and event.text
            open_call = None
        else:
            assert open_call is None or isinstance(json.loads(arguments), dict), "the call before is whole"
            open_call, arguments = (event.index, "") if isinstance(event, ToolCallStarted) else (None, "")


@given(
    family=st.sampled_from(sorted(FORMATS)),
    parts=st.lists(
        st.one_of(
            st.sampled_from([example.text for example in WHOLE]),
            st.sampled_from(
                [*"{}[]()\"',:\\ \n<>=", "<tool_call>", "</tool_call>", "<think>", "</think>", "functools"]
            ),
            st.sampled_from(MARKS),
            st.text(max_size=8),
        ),
        max_size=6,
    ),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    opened=st.booleans(),
)
def test_whatever_comes_in_whatever_pieces(family: str, parts: list[str], cuts: list[int], opened: bool) -> None:
    text, format = "".join(parts), FORMATS[family]
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    scanner = format.scanner(tools=TOOLS, reasoning_open=opened, seed=b"seed")
    events: list[ReplyEvent] = []
    for piece in pieces:
        events += scanner.feed(piece)
        before = fold(events)  # what was emitted is whole: calls have their arguments, and these are JSON
        assert all(isinstance(call.arguments, dict) for call in before.tool_calls)
    events += scanner.finish()
    whole = fold(events)
    for cut in (pieces, list(text)):
        in_pieces = events_of(format, cut, opened=opened, calls_in_pieces=True)
        check_order(in_pieces)
        assert said(fold(in_pieces)) == said(whole)
    assert whole == fold(events_of(format, [text], opened=opened)) == fold(events_of(format, list(text), opened=opened))
    assert scanner.feed("") == scanner.finish() == []
    # Nothing but tags, calls and whitespace next to them is missing: what is emitted follows the text's order.
    emitted = "".join(event.text for event in events if isinstance(event, ContentDelta | ReasoningDelta))
    assert is_within("".join(emitted.split()), "".join(text.split()))
    left_out = (*(format.reasoning or ()), *format.marks.texts(), "<response>", "</response>", "<|channel|>", " to=")
    if not whole.tool_calls and not opened and not any(mark in text for mark in left_out):
        assert whole.content == text


def is_within(part: str, text: str) -> bool:
    """Whether the characters of `part` stand in `text` in this order."""
    rest = iter(text)
    return all(character in rest for character in part)


@given(st.text(), st.sampled_from(sorted(FORMATS)))
def test_plain_text_is_content_to_the_last_character(text: str, family: str) -> None:
    plain = text.replace("<", "").replace("[", "").replace("{", "").replace("functools", "")
    assert FORMATS[family].parse(plain, tools=TOOLS).content == plain


def test_without_tools_calls_are_text_and_reasoning_is_still_split() -> None:
    text = '<think>x</think><tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    reply = FORMATS["hermes"].parse(text)
    assert (reply.reasoning, reply.tool_calls) == ("x", ())
    assert reply.content == text.removeprefix("<think>x</think>")


def test_text_leaves_as_soon_as_it_is_decided() -> None:
    scanner = FORMATS["hermes"].scanner(tools=TOOLS)
    assert scanner.feed("Look at") == [ContentDelta("Look at")]
    assert scanner.feed(" <tool") == []
    assert scanner.feed("box> ") == [ContentDelta(" <toolbox>")]
    assert scanner.feed('<tool_call>{"name": "time", "arguments": {') == []
    started, arguments = scanner.feed("}}")
    assert isinstance(started, ToolCallStarted) and (started.index, started.name) == (0, "time")
    assert arguments == ToolCallArguments(0, "{}")
    scanner = FORMATS["hermes"].scanner(reasoning_open=True)
    assert scanner.feed("Let me see. ") == [ReasoningDelta("Let me see.")]
    assert scanner.feed("</think>\n\n") == []
    assert scanner.feed("Yes") == [ContentDelta("Yes")]


@pytest.mark.parametrize(
    ("family", "pieces", "told"),
    [
        ("hermes", ['<tool_call>{"name": "wea', 'ther", "arguments": {"ci', 'ty": "Par', 'is\n"', "}}</tool_call>"],
         ['{"ci', 'ty": "Par', 'is\\n"', "}"]),
        ("llama3_json", ['{"name": "weather", "parameters": {', '"city": 3', "}}"], ["{", '"city": 3', "}"]),
        ("mistral", ["[TOOL_CALLS]weather[ARGS]", '{"city"', ': "\\', '"a\\"', '"}'],
         ['{"city"', ': "\\', '"a\\"', '"}']),
        ("phi4mini", ['functools[{"name": "time", "arguments": {', "}}]"], ["{", "}"]),
        ("pythonic", ['[weather(city="Ro', 'me", days', "=3,", ")]"], ["{", '"city": "Rome"', ', "days": 3', "}"]),
        ("olmo", ["<function_calls>weather(", "city='Rome')"], ["{", '"city": "Rome"', "}"]),
        ("hermes", ["<tool_call><function=weather>", "<parameter=days>3</par", "ameter></function>"],
         ["{", '"days": 3', "}"]),
        ("harmony", ["<|channel|>commentary to=functions.weather <|con", "strain|>json<|message|>{", '"city": ', "3}"],
         ["{", '"city": ', "3}"]),
    ],
)  # fmt: skip
def test_arguments_leave_while_they_are_written(family: str, pieces: list[str], told: list[str]) -> None:
    scanner = FORMATS[family].scanner(tools=TOOLS, pieces=True)
    events = [scanner.feed(piece) for piece in pieces]
    calls = [event for piece in events for event in piece]
    assert isinstance(calls[0], ToolCallStarted)
    assert [event.text for event in calls[1:] if isinstance(event, ToolCallArguments)] == told
    assert sum(any(isinstance(event, ToolCallArguments) for event in piece) for piece in events) >= len(told) - 1
    assert not scanner.finish() and len(fold(calls).tool_calls) == 1


def test_a_call_that_breaks_off_is_dropped_and_is_content() -> None:
    scanner = FORMATS["hermes"].scanner(tools=TOOLS, pieces=True)
    text = '<tool_call>{"name": "write", "arguments": {"path": "a.py", "text": "de'
    started, arguments = scanner.feed(text)
    assert isinstance(started, ToolCallStarted) and started.name == "write"
    assert arguments == ToolCallArguments(0, '{"path": "a.py", "text": "de')
    assert scanner.finish() == [ToolCallDropped(0, text)]
    scanner = FORMATS["hermes"].scanner(tools=TOOLS, pieces=True)
    events = [*scanner.feed('<tool_call>{"name": "time", "arguments": {}, "name": "write"}</tool_call>')]
    events += [*scanner.feed('<tool_call>{"name": "time", "arguments": {}}</tool_call>'), *scanner.finish()]
    assert [type(event).__name__ for event in events if not isinstance(event, ContentDelta)] == [
        "ToolCallStarted", "ToolCallArguments", "ToolCallDropped", "ToolCallStarted", "ToolCallArguments",
    ]  # fmt: skip
    assert [call.name for call in fold(events).tool_calls] == ["time"], "an index is not used twice"


def test_calls_of_unknown_tools_and_calls_while_thinking_come_whole() -> None:
    scanner = FORMATS["hermes"].scanner(tools=TOOLS, pieces=True)
    assert scanner.feed('<tool_call>{"name": "unknown", "arguments": {') == []
    assert len(scanner.feed("}}")) == 2
    scanner = FORMATS["hermes"].scanner(tools=TOOLS, pieces=True, reasoning_open=True)
    assert scanner.feed('<tool_call>{"name": "time", "arguments": {') == []
    scanner.feed("}}</tool_call> I could say.</think>No.")
    assert scanner.finish() == []


def test_calls_of_an_array_that_was_cut_are_calls() -> None:
    text = '[TOOL_CALLS][{"name": "time", "arguments": {}}, {"name": "weather", "arguments": {"city": "Pa'
    reply = FORMATS["mistral"].parse(text, tools=TOOLS)
    assert [call.name for call in reply.tool_calls] == ["time"]
    assert reply.content == ', {"name": "weather", "arguments": {"city": "Pa'


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("thought", ["", "Hm.</think>\n"])
def test_a_whole_call_before_one_that_was_cut_is_a_call(opened: bool, thought: str) -> None:
    """Also where the prompt has opened the reasoning, and the model calls without ending it."""
    text = f'{thought}<tool_call>{{"name": "time", "arguments": {{}}}}</tool_call>\n<tool_call>{{"name": "weath'
    reply = FORMATS["hermes"].parse(text, tools=TOOLS, reasoning_open=opened)
    assert [call.name for call in reply.tool_calls] == ["time"]
    assert reply.content.endswith('<tool_call>{"name": "weath') and "time" not in reply.content + reply.reasoning
    assert reply.reasoning == ("Hm." if opened and thought else "")


def test_ids_are_unique_and_follow_the_seed() -> None:
    text = '<tool_call>{"name": "time"}</tool_call><tool_call>{"name": "time"}</tool_call>'
    hermes = FORMATS["hermes"]

    def ids(seed: bytes | None) -> tuple[str, ...]:
        return tuple(call.id for call in hermes.parse(text, tools=TOOLS, seed=seed).tool_calls)

    assert ids(b"one") == ids(b"one")
    assert len({*ids(b"one"), *ids(b"two"), *ids(None), *ids(None)}) == 8
    short = FORMATS["mistral"].parse("[TOOL_CALLS]time{}", tools=TOOLS).tool_calls[0].id
    assert len(short) == 9 and short.isalnum(), "Mistral's templates take no other ids"


@pytest.mark.clock
@pytest.mark.parametrize(
    ("family", "piece"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"a": "'),
        ("hermes", "<tool_call>["),
        ("hermes", "<tool_call>" + "[" * 60),
        ("hermes", "<think>"),
        ("hermes", "\n "),
        ("llama3_json", "\n{"),
        ("llama3_json", '\n{"name":'),
        ("mistral", "[TOOL_CALLS]a"),
        ("pythonic", "\n[weather("),
        ("pythonic", "[[(("),
        ("olmo", "<function_calls>f("),
        ("hermes", "<tool_call><function=a><parameter=b>"),
        ("harmony", "<|start|>"),
        ("harmony", "<|start|>assistant<|channel|>analysis"),
        ("harmony", "<|channel|>commentary to=functions.time<|message|>{"),
    ],
)
@pytest.mark.parametrize("pieces", [False, True])
def test_the_time_grows_with_the_length_and_no_faster(family: str, piece: str, pieces: bool) -> None:
    def seconds(count: int) -> float:
        scanner = FORMATS[family].scanner(tools=TOOLS, pieces=pieces)
        start = time.process_time()
        for _ in range(count):
            scanner.feed(piece)
        scanner.finish()
        return time.process_time() - start

    seconds(10)
    many, quick = seconds(3200), 0.002
    if many < 8 * 5 * quick:
        return
    few, many = min(seconds(400) for _ in range(3)), min(many, seconds(3200))
    assert many < 8 * 5 * max(few, quick), f"{many:.3f} s for 8 times what took {few:.3f} s"


def test_deep_nesting_and_long_numbers_are_text() -> None:
    for value in ("[" * 200 + "]" * 200, "9" * 5000, "1e999999"):
        text = f'<tool_call>{{"name": "time", "arguments": {{"a": {value}}}}}</tool_call>'
        assert FORMATS["hermes"].parse(text, tools=TOOLS).content == text
        text = f"[time(a={value})]"
        assert FORMATS["pythonic"].parse(text, tools=TOOLS).content == text
    lone = '<tool_call>{"name": "time", "arguments": {"a": "\\ud800"}}</tool_call>'
    assert FORMATS["hermes"].parse(lone, tools=TOOLS).content == lone, "half a surrogate pair is no text"


@pytest.mark.clock
@pytest.mark.parametrize(
    ("family", "part"),
    [("hermes", "<tool_call>x"), ("phi4mini", "functools["), ("harmony", "<|channel|>"), ("harmony", "a<|end|>")],
)
def test_many_markers_in_one_piece_are_found_in_one_search(family: str, part: str) -> None:
    """Those that a text lacks were looked for to its end, at each of the others."""

    def seconds(count: int) -> float:
        start = time.thread_time()
        FORMATS[family].parse(part * count, tools=TOOLS)
        return time.thread_time() - start

    seconds(10)
    few, many = min(seconds(2_000) for _ in range(3)), min(seconds(16_000) for _ in range(2))
    assert many < 8 * 2 * few, f"{many:.3f} s for 8 times what took {few:.3f} s"


@pytest.mark.parametrize("text", ["<|channel|>{} to=functions.time<|message|>{{}}", "<|start|>{}<|message|>a"])
@pytest.mark.parametrize("length", [370, 380, 390, 400, 410, 500])
def test_how_long_a_header_may_be_does_not_depend_on_its_pieces(text: str, length: int) -> None:
    whole = text.format("a" * length)
    expected = fold(events_of(FORMATS["harmony"], [whole]))
    assert fold(events_of(FORMATS["harmony"], [*whole])) == expected


@pytest.mark.parametrize("count", [100, 1_023, 1_024, 1_025, 5_000])
def test_how_much_space_may_stand_before_a_literal_does_not_depend_on_pieces(count: int) -> None:
    for text in (f"[time({' ' * count})]", f"<tool_call>{' ' * count}<function=time></function>", " " * count + "a"):
        for family in ("hermes", "pythonic"):
            expected = fold(events_of(FORMATS[family], [text]))
            assert fold(events_of(FORMATS[family], [*text])) == expected


def test_what_begins_as_a_call_and_is_none_is_unread() -> None:
    for text, unread in (
        ('So:\n<tool_call>{"name": "time"\n\nWell.', ('<tool_call>{"name": "time"',)),
        ('<tool_call>{"name": "time", "arguments": {}}</tool_call> <tool_call>{"nam', ('<tool_call>{"nam',)),
        ("<tool_call>no\n<tool_call>{}</tool_call>", ("<tool_call>no", "<tool_call>{}</tool_call>")),
        ('{"name": "unknown", "parameters": {}}', ()),
        ("a < b", ()),
    ):
        for calls_in_pieces in (False, True):
            for size in (1, 3, 1_000):
                pieces = [text[at : at + size] for at in range(0, len(text), size)]
                reply = fold(events_of(FORMATS["hermes"], pieces, calls_in_pieces=calls_in_pieces))
                assert reply.unread == unread, (text, size, calls_in_pieces)


@pytest.mark.parametrize("length", [0, 200, 250, 254, 255, 256, 257, 258, 260, 300, 600])
@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "<tool_call><function={}></function>"),
        ("hermes", "<tool_call><function=time><parameter={}>x</parameter></function>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="time"{}><tool_call></invoke>'),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁sep｜>{{}}"),
        ("glm", "<tool_call>{}</tool_call>"),
        ("gemma4", "<|tool_call>call:time{{{}:1}}"),
    ],
)
def test_how_long_a_name_may_be_does_not_depend_on_its_pieces(family: str, text: str, length: int) -> None:
    whole = text.format("a" * length) + "<tool_call><think>x"
    expected = fold(events_of(FORMATS[family], [whole]))
    for size in (1, 7, 100):
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        assert fold(events_of(FORMATS[family], pieces)) == expected
