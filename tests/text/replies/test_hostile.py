"""Hostile replies: open tags, marks by the thousand, calls in calls. Each is read in steps that grow with the text and
no faster, and nothing is raised."""

from __future__ import annotations

import itertools
import sys
import tracemalloc
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from helpers.replies import TOOLS
from helpers.thorough import by_default
from rekindle._src.text.replies import ReplyFormat, ReplyPlan, arguments, fold
from rekindle._src.text.replies.arguments import kinds_of
from rekindle._src.text.replies.call import known_tools
from rekindle._src.text.replies.families import SYNTAXES
from rekindle._src.text.replies.response_template import ResponseTemplate
from text.replies.test_response_template import REPLIES, TEMPLATES


def formats() -> dict[str, ReplyFormat]:
    templates = {f"template {name}": ReplyFormat(template=ResponseTemplate.load(TEMPLATES[name])) for name in TEMPLATES}
    return {**{name: ReplyFormat.of_family(name) for name in SYNTAXES}, **templates}


FORMATS = formats()


def parts(name: str) -> Iterator[str]:
    """Texts that a hostile reply repeats, for a format."""
    format = FORMATS[name]
    marks = sorted(format.markers(tools=True))
    yield "".join(marks)
    yield "".join(reversed(marks))
    if format.template is not None:
        whole = next(text for one, _, text, *_ in REPLIES if f"template {one}" == name)
        opener = marks[0]
    else:
        syntax = SYNTAXES[name]
        whole = syntax.write([("weather", {"city": "x", "days": {"a": [1]}}), ("time", {})])
        opener = syntax.openers[0].text if syntax.openers else marks[0]
    yield whole
    yield whole[: len(whole) // 2]
    yield opener
    yield opener + "\n \t"
    yield whole[: len(opener) + 8] + '{"["'


def hash_of(case: tuple[str, str]) -> int:
    """A number that is the same in every process."""
    return sum(case[0].encode()) + sum(case[1].encode())


CASES = [(name, part) for name in FORMATS for part in parts(name)]


def steps(format: ReplyFormat, text: str, size: int, *, opened: bool) -> int:
    """Lines of this package that run while a reply is read in pieces of a size."""
    count = 0

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return line if "/text/replies/" in frame.f_code.co_filename else None

    prompt = (format.reasoning or ("",))[0] if opened else ""
    scanner = ReplyPlan(format, tuple(TOOLS), pieces=True).scanner(prompt, b"", 0)
    before = sys.gettrace()
    sys.settrace(call)
    try:
        events = [event for at in range(0, len(text), size) for event in scanner.feed(text[at : at + size])]
        events += scanner.finish()
    finally:
        sys.settrace(before)
    fold(events)
    return count


def test_there_are_two_hundred() -> None:
    assert len(CASES) >= 200


@pytest.mark.parametrize(
    ("name", "part"), by_default(CASES, lambda case: hash_of(case) % 30 == 0), ids=lambda value: repr(value)[:30]
)
def test_a_hostile_reply_takes_as_many_steps_as_it_is_long(name: str, part: str) -> None:
    format = FORMATS[name]
    for opened in (False, True):
        short, long = (part * (length // len(part) + 1) for length in (2_000, 8_000))
        for size in (7, 100_000):
            few, many = steps(format, short, size, opened=opened), steps(format, long, size, opened=opened)
            assert many <= 4.6 * few + 5_000, (name, part, size, few, many)


@pytest.mark.parametrize("name", by_default(sorted(FORMATS), lambda name: name in ("glm", "hermes", "template list")))
def test_64_kilobytes_of_marks_are_read(name: str) -> None:
    for part in parts(name):
        text = part * ((1 << 16) // len(part))
        reply = FORMATS[name].parse(text, tools=TOOLS, seed=b"x")
        assert len(reply.content) + len(reply.reasoning) <= 2 * len(text)


def definitions(ways: int, levels: int = 4) -> dict[str, Any]:
    """Definitions each of which names the next one in several alternatives: `ways` to the power of `levels` paths."""
    names = [f"of{level}" for level in range(levels + 1)]
    inner: dict[str, Any] = {names[-1]: {"type": "integer"}}
    return inner | {
        name: {"anyOf": [{"$ref": f"#/$defs/{following}"}] * ways} for name, following in itertools.pairwise(names)
    }


def test_a_schema_of_references_is_looked_at_in_bounded_steps() -> None:
    """24 kB of definitions stand for eight thousand million schemas. Each value of a call asks for its type."""
    schema = {"$ref": "#/$defs/of0", "$defs": definitions(300)}
    assert kinds_of(schema) is None, "it does not say"
    assert kinds_of({"$ref": "#/$defs/of0", "$defs": definitions(2, 3)}) == {"integer"}
    assert kinds_of({"enum": [*range(arguments.MAX_CHOICES), "x"]}) is None
    assert kinds_of({"enum": [1, "x"]}) == {"integer", "number", "string"}
    assert kinds_of({"type": ["integer"] * 200}) is None
    many = {"enum": [1] * 40}
    assert kinds_of({"anyOf": [many] * 100}) == {"integer", "number"}
    assert kinds_of({"anyOf": [many] * 103}) is None, "all of its values together are looked at"


def test_a_tool_s_definitions_are_not_copied_for_each_parameter_and_sequence() -> None:
    """Each of `n` sequences has its table of tools: with a copy for each of 5,000 parameters it took a megabyte."""
    schema = {
        "type": "object",
        "properties": {f"p{at}": {} for at in range(5_000)},
        "$defs": {"a": {"type": "integer"}},
    }
    schema["properties"]["n"] = {"$ref": "#/$defs/a"}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    tracemalloc.start()
    try:
        tables = [known_tools([tool]) for _ in range(100)]
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert size < 1 << 20
    assert kinds_of(tables[0]["f"]["n"]) == {"integer"}
    assert len(tables[0]["f"]) == 5_001 and "p7" in tables[0]["f"] and "p" not in tables[0]["f"]


@pytest.mark.parametrize("name", sorted(SYNTAXES))
def test_a_name_that_reads_as_a_place_is_written_once(name: str) -> None:
    """60 kB of names in an earlier call became 600 MB of text."""
    text = SYNTAXES[name].write([("{name}" * 100 + "{index}", {"a": 1})])
    assert len(text) < 2_000 and text.count("{name}" * 100 + "{index}") in (1, 2)
