"""Reads calls in tags while they arrive: a name, and each argument as text between tags.

`Tags` says how a family spells them. Numbers, objects and other values have the type that the tool's schema gives
them, as `arguments.typed` decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from rekindle._src.text.replies.arguments import Arguments, json_value, kinds_of, typed
from rekindle._src.text.replies.call import (
    MAX_NAME,
    Calls,
    MalformedCall,
    Reading,
    ReplyCall,
    TextSource,
    ahead,
    named_call,
    peek,
    skip_space,
    take,
)
from rekindle._src.text.replies.json_reader import MAX_DEPTH, read_arguments
from rekindle._src.text.replies.python_reader import read_value

_LINE = re.compile(r"[^<\n{\[(]*")
_CDATA = "<![CDATA["
T = TypeVar("T")


class CallTags(NamedTuple):
    """The spelling of a call after its opening tag, such as `<function=`.

    A tag with attributes ends at `head_ends`, and its other attributes may say if a value is a text:
    `string="true"`, `type="string"`.
    """

    name_ends: str  # after the name; "" if the name ends with its line or at the next tag
    argument: str  # the beginning of an argument, up to its name
    key_ends: str  # after the name of an argument
    value_ends: str
    ends: str  # after the arguments
    head_ends: str = ""  # of a tag with attributes
    value: str = ""  # the beginning of a value, if it has a tag of its own
    trims: bool = False  # one line break at each end of a value, whether the other is there or not


def read_tagged(calls: Calls, tags: CallTags, *, only_known: bool = False) -> Reading[ReplyCall]:
    """Read a call from after its opening tag to its end.

    With `only_known`, a name that is no tool's is `MalformedCall`. Arguments may also be one JSON object.
    """
    source = calls.source
    if tags.name_ends:
        name = (yield from read_to(source, tags.name_ends, MAX_NAME)).strip()
    else:
        name = (yield from _read_line(source)).strip()
    if not name or (only_known and name not in calls.known):
        raise MalformedCall
    if tags.head_ends:
        yield from read_to(source, tags.head_ends, MAX_NAME)
    if (yield from ahead(source, "{")):
        text = yield from read_arguments(calls, name)
        if not (yield from take(source, tags.ends)):
            raise MalformedCall
        return named_call(name, text)
    schemas = calls.known.get(name, {})
    arguments = Arguments(calls.begin(name))
    while not (yield from take(source, tags.ends)):
        if not (yield from take(source, tags.argument)):
            raise MalformedCall
        key = (yield from read_to(source, tags.key_ends, MAX_NAME)).strip()
        head = (yield from read_to(source, tags.head_ends, MAX_NAME)) if tags.head_ends else ""
        if not key or (tags.value and not (yield from take(source, tags.value))):
            raise MalformedCall
        text = yield from _read_text(source, tags)
        arguments.add(key, _value(text, head, schemas.get(key)))
    return arguments.call(name)


def _read_line(source: TextSource) -> Reading[str]:
    parts: list[str] = []
    length = 0
    while (yield from peek(source)):
        match = _LINE.match(source.text, source.at)
        assert match is not None, "the pattern matches an empty text"
        parts.append(match.group())
        length += len(match.group())
        if length > MAX_NAME:
            raise MalformedCall
        source.at = match.end()
        if source.at < len(source.text):
            return "".join(parts)
    raise MalformedCall


def _read_text(source: TextSource, tags: CallTags) -> Reading[str]:
    if tags.head_ends and (yield from take(source, _CDATA)):
        text = yield from read_to(source, "]]>", None)
        if not (yield from take(source, tags.value_ends)):
            raise MalformedCall
        return text
    text = yield from read_to(source, tags.value_ends, None)
    if tags.trims:
        return text.removeprefix("\n").removesuffix("\n")
    if not tags.value and text.startswith("\n") and text.endswith("\n"):
        return text[1:-1]
    return text


def _value(text: str, head: str, schema: object) -> Any:
    if 'string="true"' in head or 'type="string"' in head:
        return text
    if 'string="false"' in head or "type=" in head:
        try:
            return json_value(text)
        except MalformedCall:
            return text
    return typed(text, schema, literal)


def literal(text: str) -> Any:
    """Return the value of a text in JSON or in Python's notation; raises `MalformedCall` if it has none."""
    try:
        return json_value(text)
    except MalformedCall:
        return whole(text, read_value)


def whole(text: str, read: Callable[[TextSource], Reading[T]]) -> T:
    """Return the result of reading all of a text; raises `MalformedCall` if more than whitespace is left."""
    source = TextSource()
    source.push(text)
    source.ended = True
    value: T | None = None

    def run() -> Reading[None]:
        nonlocal value
        value = yield from read(source)
        yield from skip_space(source)

    assert next(run(), source) is source, "a text that has ended is not waited for"
    if source.at < len(text):
        raise MalformedCall
    return cast(T, value)


def read_to(source: TextSource, end: str, limit: int | None) -> Reading[str]:
    """Return the text before `end`, which is read as well.

    A longer one than `limit` is `MalformedCall`, after exactly so many characters: what is read then does not depend on
    the pieces in which the text came.
    """
    parts: list[str] = []
    length = 0
    while True:
        if (yield from peek(source)) == "":
            raise MalformedCall
        most = len(source.text) if limit is None else source.at + limit - length
        bound = min(len(source.text), most + len(end))
        end_at = source.text.find(end, source.at, bound)
        is_long = end_at < 0 and limit is not None and bound == most + len(end)
        stop = end_at if end_at >= 0 else most if is_long else max(source.at, bound - len(end) + 1)
        parts.append(source.text[source.at : stop])
        length += stop - source.at
        source.at = stop
        if is_long:
            raise MalformedCall
        if end_at >= 0:
            source.at += len(end)
            return "".join(parts)
        if source.ended:
            source.at = len(source.text)
            raise MalformedCall
        yield


def read_elements(calls: Calls, mark: str) -> Reading[ReplyCall]:
    """Read a call from after `<invoke name="`, with an element for each argument: `<city>Rome</city>`.

    `mark` stands before each tag. Elements inside of elements are objects, or lists of `<item>`; a value whose schema
    allows a string is its text, tags included.
    """
    source = calls.source
    name = (yield from read_to(source, '"', MAX_NAME)).strip()
    yield from read_to(source, ">", MAX_NAME)
    schemas = calls.known.get(name, {})
    arguments = Arguments(calls.begin(name))
    while not (yield from take(source, f"{mark}</invoke>")):
        if not (yield from take(source, f"{mark}<")):
            raise MalformedCall
        key = (yield from read_to(source, ">", MAX_NAME)).strip()
        text = yield from _read_element(source, mark)
        if not key:
            raise MalformedCall
        arguments.add(key, _of_elements(text, mark, schemas.get(key)))
    return arguments.call(name)


def _read_element(source: TextSource, mark: str) -> Reading[str]:
    """Return the text of an element, and read past its closing tag."""
    parts: list[str] = []
    depth = 1
    while True:
        parts.append((yield from read_to(source, mark, None)))
        ends = yield from take(source, "</")
        if not ends and not (yield from take(source, "<")):
            raise MalformedCall
        tag = yield from read_to(source, ">", MAX_NAME)
        depth += -1 if ends else 1
        if depth == 0:
            return "".join(parts)
        if depth > MAX_DEPTH:
            raise MalformedCall
        parts.append(f"{mark}{'</' if ends else '<'}{tag}>")


class _Element:
    """An element that is open: its schema, its text, and its elements by name."""

    def __init__(self, name: str, schema: object) -> None:
        self.name, self.schema = name, schema
        self.text = ""
        self.inner: list[tuple[str, Any]] = []

    def schema_of(self, name: str) -> object:
        schemas = [self.schema] if isinstance(self.schema, Mapping) else []
        for key in ("anyOf", "oneOf"):
            schemas += [part for part in schemas[0].get(key, ()) if isinstance(part, Mapping)] if schemas else []
        for schema in schemas:
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return properties[name]
            if name == "item" and "items" in schema:
                return schema["items"]
        return None

    def value(self) -> Any:
        kinds = kinds_of(self.schema)
        if not self.inner:
            return (
                []
                if kinds == frozenset({"array"}) and not self.text.strip()
                else typed(self.text, self.schema, literal)
            )
        if all(name == "item" for name, _ in self.inner) and not (kinds and "array" not in kinds):
            return [value for _, value in self.inner]
        values: dict[str, Any] = {}
        for name, value in self.inner:
            if name in values:
                raise MalformedCall
            values[name] = value
        return values


def _of_elements(text: str, mark: str, schema: object) -> Any:
    if "string" in (kinds_of(schema) or ()) or mark not in text:
        return typed(text, schema, literal)
    root = _Element("", schema)
    open_elements = [root]
    root.text, *tags = text.split(mark)
    for part in tags:
        tag, _, rest = part.partition(">")
        top = open_elements[-1]
        if tag.startswith("</"):
            if top is root:
                raise MalformedCall
            open_elements.pop()
            open_elements[-1].inner.append((top.name, top.value()))
        else:
            name = tag.removeprefix("<").strip()
            open_elements.append(_Element(name, top.schema_of(name)))
            open_elements[-1].text = rest
    if len(open_elements) != 1:
        raise MalformedCall
    return root.value()
