"""A call as a family's syntax wrote it, the tools that a reply may call, and what a syntax consists of.

A syntax is the texts that open calls with their readers, and what is written: the form of calls that a model must
make, and the text of earlier ones.

Readers are generators: they `yield` where they need more text, and go on once there is some or the text has ended.
Their results therefore depend on the characters alone, never on the pieces in which these came.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from rekindle.errors import InvalidRequest

T = TypeVar("T")
Reading = Generator[None, None, T]
SPACE = " \t\r\n"
# Characters of arguments as text: of a call, which is parsed at once, and of all calls of a conversation.
MAX_ARGUMENTS, MAX_ALL_ARGUMENTS = 1 << 20, 4 << 20
MAX_SPACE = 1_024  # characters of whitespace that may stand before a literal: they stay unread until it comes


class MalformedCall(Exception):
    """The text after a marker is not a call."""


class TextSource:
    """Text with a position, and with a mark from which it may have to be returned unchanged."""

    def __init__(self) -> None:
        self.text: str = ""
        self.at: int = 0
        self.base: int = 0  # characters before `text`
        self.ended: bool = False
        self._marked = 0  # the mark's place in `text`; text read since then and no longer in `text` is in `_consumed`
        self._consumed: list[str] = []
        self._places: dict[str, int] = {}  # of literals in `text`, where they were looked for last

    def push(self, text: str) -> None:
        """Add text, and forget text that was read before the mark."""
        self._consumed.append(self.text[self._marked : self.at])
        self.text = self.text[self.at :] + text
        self.base += self.at
        self.at = self._marked = 0
        self._places.clear()

    @property
    def place(self) -> int:
        """The number of characters that were read."""
        return self.base + self.at

    def find(self, literal: str) -> int:
        """Return the place of the next unread literal, or -1. No text is searched twice."""
        place = self._places.get(literal, 0)
        if 0 <= place <= self.at:
            place = self._places[literal] = self.text.find(literal, self.at)
        return place

    def mark(self) -> None:
        """Begin to remember the text that is read."""
        self._consumed.clear()
        self._marked = self.at

    def since_mark(self) -> str:
        """Return the text read since the mark."""
        return "".join(self._consumed) + self.text[self._marked : self.at]


def peek(source: TextSource) -> Reading[str]:
    """Return the next character, which stays unread; "" at the end."""
    while source.at == len(source.text):
        if source.ended:
            return ""
        yield
    return source.text[source.at]


def skip_space(source: TextSource) -> Reading[None]:
    """Read on to the next character that is no whitespace."""
    while (char := (yield from peek(source))) and char in SPACE:
        source.at += 1


def ahead(source: TextSource, *literals: str) -> Reading[int]:
    """Return the number of characters of these texts, each after whitespace, if they come next; else 0."""
    length = 0
    for literal in literals:
        while True:
            at = source.at + length
            while at < len(source.text) and source.text[at] in SPACE:
                at += 1
            length = at - source.at
            if length > MAX_SPACE:
                return 0
            if source.text.startswith(literal, at):
                length += len(literal)
                break
            if source.ended or not literal.startswith(source.text[at : at + len(literal)]):
                return 0
            yield
    return length


def take(source: TextSource, *literals: str) -> Reading[bool]:
    """Read these texts if they come next, as in `ahead`; else read nothing."""
    length = yield from ahead(source, *literals)
    source.at += length
    return length > 0


def close(source: TextSource, literal: str) -> Reading[bool]:
    """Read a closing tag if it comes next, after whitespace, or as much of it as there is at the end of the text."""
    if (yield from take(source, literal)):
        return True
    rest = source.text[source.at : source.at + MAX_SPACE].lstrip(SPACE)
    cut = source.ended and len(rest) > 0 and literal.startswith(rest)
    if cut:
        source.at = len(source.text)
    return cut


def forward(source: TextSource, reading: Reading[T], tell: Callable[[str], object]) -> Reading[T]:
    """Run a reading, and pass on each piece of text that it has read as soon as it needs more."""
    start = source.at
    while True:
        try:
            next(reading)
        except StopIteration as done:
            tell(source.text[start : source.at])
            value: T = done.value
            return value
        tell(source.text[start : source.at])
        yield
        start = source.at  # text read before is forgotten by now, so that this is 0; or the text has ended


def capture(source: TextSource, reading: Reading[None]) -> Reading[str]:
    """Run a reading and return the text that it has read."""
    parts: list[str] = []
    yield from forward(source, reading, parts.append)
    return "".join(parts)


_DECODER = json.JSONDecoder(strict=False)  # takes raw line breaks inside strings
NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters", "args")
MAX_NAME = 256

_DEFINITIONS = ("$defs", "definitions")

Known = Mapping[str, Mapping[str, Any]]  # names of tools, and for each its parameters' names and schemas


class ReplyCall(NamedTuple):
    """A name, arguments, and these as JSON text."""

    name: str
    arguments: Mapping[str, Any]
    text: str
    id: str = ""  # as the model wrote it, for families whose templates repeat it

    @classmethod
    def of(cls, name: object, arguments: object, text: str | None = None, *, id: str = "") -> ReplyCall:
        """Return the call; raises `MalformedCall` if the name is no name or the arguments are no object."""
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise MalformedCall
        if not isinstance(arguments, dict):
            raise MalformedCall
        as_json(name)
        plain = as_json(arguments)
        return cls(name, arguments, plain if text is None else text, id)


def as_json(value: object) -> str:
    """Return the value as JSON text; raises `MalformedCall` for a value that JSON does not have."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # half of a surrogate pair is not text
    except (ValueError, TypeError):
        raise MalformedCall from None
    return text


def check_arguments(messages: Any) -> None:
    """Raise `InvalidRequest` for messages with more text in arguments of calls than is read.

    They are JSON inside a string, which the bound on a body's values does not count: every three bytes of it, such as
    `[],`, may become a list.
    """
    size = 0
    for message in messages if isinstance(messages, list | tuple) else ():
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        for call in calls if isinstance(calls, list | tuple) else ():
            function = call.get("function", call) if isinstance(call, Mapping) else None
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            length = len(arguments) if isinstance(arguments, str) else 0
            size += length
            if length > MAX_ARGUMENTS:
                problem = f"have a call with {length:,} characters of arguments, and {MAX_ARGUMENTS:,} are read"
                raise InvalidRequest("messages", f"{len(messages):,} messages", problem, "Shorten its arguments")
    if size > MAX_ALL_ARGUMENTS:
        problem = f"have calls with {size:,} characters of arguments, and {MAX_ALL_ARGUMENTS:,} are read"
        raise InvalidRequest("messages", f"{len(messages):,} messages", problem, "Leave old calls out")


def known_tools(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Return names and parameters of tools, which are JSON schemas, in OpenAI's shape or without its outer layer."""
    tools_by_name: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        inner = tool.get("function")
        function = inner if isinstance(inner, Mapping) else tool
        parameters = function.get("parameters", function.get("input_schema"))
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        shared = {key: parameters[key] for key in _DEFINITIONS if key in parameters} if properties else {}
        if isinstance(properties, Mapping) and shared:
            properties = _Parameters(properties, shared)
        if isinstance(function.get("name"), str):
            tools_by_name[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return tools_by_name


class _Parameters(Mapping[str, Any]):
    """Parameters with the definitions that their schemas share. Each sequence of a request has a table of them, so one
    is put together where it is read."""

    def __init__(self, schemas: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
        self._schemas, self._shared = schemas, shared

    def __getitem__(self, name: str) -> Any:
        schema = self._schemas[name]
        return {**schema, **self._shared} if isinstance(schema, Mapping) else schema

    def __iter__(self) -> Iterator[str]:
        return iter(self._schemas)

    def __len__(self) -> int:
        return len(self._schemas)


def json_call(text: str, *, complete: bool = False) -> ReplyCall:
    """Return the call that a JSON object describes. Raises `MalformedCall` if it describes none.

    A call without arguments has an empty object of them, or is malformed if it has to be `complete`.
    """
    try:
        return _call(text, complete)
    except (ValueError, RecursionError):
        raise MalformedCall from None


def named_call(name: str, text: str, id: str = "") -> ReplyCall:
    """Return the call with the JSON object `text` as arguments."""
    try:
        return _with_text(name, _DECODER.decode(text), text)._replace(id=id)
    except (ValueError, RecursionError):
        raise MalformedCall from None


def _call(text: str, complete: bool) -> ReplyCall:
    if not text.startswith("{"):
        raise MalformedCall
    members = _members(text)
    if not any(key in members for key in NAMES) and "function" in members:
        inner, raw = members["function"]
        if isinstance(inner, dict):
            return _call(raw, complete)
        members["name"] = (inner, raw)
    name = next((members[key][0] for key in NAMES if key in members), None)
    pair = next((members[key] for key in ARGUMENTS if key in members), None)
    if pair is None and complete:
        raise MalformedCall
    arguments, raw = pair or ({}, "{}")
    if isinstance(arguments, str):  # JSON within JSON, as in OpenAI's messages
        arguments, raw = _DECODER.decode(arguments), arguments
    if arguments is None:
        arguments, raw = {}, "{}"
    return _with_text(name, arguments, raw)


def _with_text(name: object, arguments: object, text: str) -> ReplyCall:
    try:
        json.loads(text)
    except ValueError:  # raw line breaks
        return ReplyCall.of(name, arguments)
    return ReplyCall.of(name, arguments, text)


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """Return the values of a valid JSON object by their keys, each with its own text."""
    members: dict[str, tuple[Any, str]] = {}
    at = _skip(text, 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)
        value, at = _DECODER.raw_decode(text, start)
        members[key] = (value, text[start:at])
        at = _skip(text, at)
        at = _skip(text, at + 1) if text[at] == "," else at
    return members


def _skip(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


class Calls(Protocol):
    """The context of a reader: the text, the tools, and the receiver of its calls."""

    @property
    def source(self) -> TextSource: ...
    @property
    def known(self) -> Known: ...
    @property
    def has_content(self) -> bool:
        """True if there was text before."""
        ...

    def streams(self, name: str) -> bool:
        """True if a call of `name` is emitted while it arrives."""
        ...

    def begin(self, name: str, id: str = "") -> Callable[[str], None] | None:
        """Start a call of `name`, and return a function that takes its arguments' JSON text in pieces.

        None if the call is emitted once it is complete. `emit` ends it either way.
        """
        ...

    def emit(self, *calls: ReplyCall) -> None:
        """Emit complete calls. Text read until now belongs to them; the text that follows may still be malformed."""

    def keep(self) -> None:
        """Note that the text read so far belongs to emitted calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class Opener:
    """A text at which calls may begin."""

    text: str
    read: Callable[[Calls], Reading[None]]
    bare: bool = False  # it is part of the call already, and counts at the beginning of a line only


class TagForm(NamedTuple):
    """The parts of rules around an argument in tags, and the text that ends it."""

    before: str
    after: str
    text_ends: str  # up to the first marker that is a token
    rest: str  # a part of a rule after that


class CallForm(NamedTuple):
    """How a model that must call a tool writes its calls: parts of rules in Lark's notation, as llguidance reads it."""

    call: Callable[[str], tuple[str, ...]]  # by the tool's name; `OBJECT`, `KEYWORDS`, `TAGGED` stand for its arguments
    begins: str = ""
    between: str = ""
    ends: str = ""
    tag: Callable[[str, bool], TagForm] | None = None  # around an argument, by its name; True for a text
    between_tags: str = ""


# Arguments as a JSON object, as `a=1, b="x"`, and each in tags of its own.
OBJECT, KEYWORDS, TAGGED = "@args", "@keywords", "@tagged"
NamedArguments = tuple[str, Mapping[str, Any]]  # a tool's name and the arguments of a call
Token = Callable[[str], int | None]  # from a marker to its id, if it is a single token


@dataclasses.dataclass(frozen=True, slots=True)
class CallSyntax:
    """A family's way to write calls: how it is recognized, read, asked for and repeated."""

    name: str
    openers: tuple[Opener, ...]
    form: Callable[[Token], CallForm]
    write: Callable[[Sequence[NamedArguments]], str]  # calls of an earlier reply, as the model wrote them
    signs: tuple[str | tuple[str, ...], ...]  # texts in a template that describes or repeats calls; of a tuple, all
    markers: tuple[str, ...] = ()  # texts that may be special tokens, which detokenizing leaves out by default
    id_length: int = 0  # of a call's id, where the family's template insists on one
    several: bool = True  # its template takes several calls in a message
    in_channels: bool = False  # a reply consists of messages with channels, whether there are tools or not
