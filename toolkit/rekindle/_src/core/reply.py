"""A chat's reply in its parts, answer, reasoning and calls of tools, and a structured text's object.

A scanner of `rekindle._src.text.replies` turns text into events. An event is final: no later one revokes it, except
that a call may be dropped if it was emitted while the model wrote it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rekindle._src.core.drawable import Record
from rekindle._src.core.foreign_calls import MESSAGE, ForeignNames
from rekindle.errors import NotParsed


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ContentDelta(Record):
    """Text of the answer itself."""

    text: str
    unread: bool = False  # it begins as a call does, and could not be read as one


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ReasoningDelta(Record):
    """Text that the model wrote before its answer, between the tags of its family, such as `<think>`."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ToolCallStarted(Record):
    """A call of a tool; `ToolCallArguments` with the same index follow."""

    index: int  # counts the calls of a reply
    id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ToolCallArguments(Record):
    """A part of a call's arguments; joined, they are one JSON object."""

    index: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ToolCallDropped(Record):
    """The end of a call that turned out to be none, because its text breaks off or breaks its syntax.

    Only a stream with `stream_tool_calls` has such an event, since otherwise a call starts once it is complete.
    """

    index: int
    text: str  # of the call as written so far; it is part of the answer's content


ReplyEvent = ContentDelta | ReasoningDelta | ToolCallStarted | ToolCallArguments | ToolCallDropped


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ToolCall(Record):
    """One call of a tool that a reply asks for."""

    id: str  # names the call in the message that answers it
    name: str
    arguments: Mapping[str, Any]
    arguments_text: str = ""  # the arguments as JSON

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"

    def answer(self, content: object) -> dict[str, str]:
        """Return the message with the tool's result for the model: a str as it is, anything else as JSON."""
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": as_text(content)}

    def message(self) -> dict[str, object]:
        """Return the call as an assistant's message holds it."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class ReplyMessage(ForeignNames, dict[str, Any]):
    """A reply as a message of the chat: a plain dict but for its errors."""

    __slots__ = ()
    _foreign = MESSAGE


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Reply(Record):
    """A whole reply in its parts."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    unread: tuple[str, ...] = ()  # texts of the content that begin as calls do, and could not be read as ones


def fold(events: Iterable[ReplyEvent]) -> Reply:
    """Return the reply that events add up to, without calls that have incomplete arguments."""
    content: list[str] = []
    reasoning: list[str] = []
    length, starts = 0, list[int]()  # of the content so far; of texts in it that begin as calls
    calls: dict[int, ToolCallStarted] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        match event:
            case ContentDelta(text):
                if event.unread:
                    starts.append(length + len(text) - len(text.lstrip()))
                content.append(text)
                length += len(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallStarted(index):
                calls[index] = event
            case ToolCallArguments(index, text):
                arguments.setdefault(index, []).append(text)
            case ToolCallDropped(index, text):
                calls.pop(index, None)
                starts.append(length + len(text) - len(text.lstrip()))
                content.append(text)
                length += len(text)
    tool_calls = []
    for index, call in calls.items():
        text = "".join(arguments.get(index, ()))
        with contextlib.suppress(ValueError):
            tool_calls.append(ToolCall(call.id, call.name, json.loads(text or "{}"), text))
    said = "".join(content)
    return Reply(said, "".join(reasoning), tuple(tool_calls), tuple(_unread(said, starts)))


def _unread(content: str, starts: list[int]) -> Iterator[str]:
    """Yield the texts that begin there, each up to a blank line or the next one: where reading gave up says little."""
    for start, following in itertools.pairwise([*starts, len(content)]):
        blank = content.find("\n\n", start, following)
        if text := content[start : following if blank < 0 else blank].strip():
            yield text


def as_text(value: object) -> str:
    """Return a tool's result as the text of a message."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


class ParseResult(NamedTuple):
    """An object, or the reason why there is none."""

    value: object = None
    problem: NotParsed | None = None


class DeferredParse:
    """Builds the object of a text, in the thread that asks for it, since users' classes take part."""

    __slots__ = ("_parse", "_parsed", "_text")

    def __init__(self, text: str, parse: Callable[[str], object], problem: NotParsed | None = None) -> None:
        self._text, self._parse = text, parse
        self._parsed = None if problem is None else ParseResult(None, problem)

    def get(self) -> ParseResult:
        """Return the object, the same one each time. A validator's objection becomes the problem of the result."""
        if self._parsed is None:
            try:
                self._parsed = ParseResult(self._parse(self._text))
            except Exception as error:
                message = str(error).strip() or type(error).__name__
                problem = NotParsed("invalid", f"the text does not validate: {message}")
                problem.__cause__ = error
                self._parsed = ParseResult(None, problem)
        return self._parsed

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self._text, tuple(self.get()))


def _made(text: str, parsed: tuple[Any, NotParsed | None]) -> DeferredParse:
    parsing = DeferredParse(text, str)
    parsing._parsed = ParseResult(*parsed)
    return parsing


Parsed = ParseResult  # in pickled completions of 0.1
