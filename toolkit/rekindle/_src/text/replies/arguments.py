"""Arguments of a call as they are read, one by one, and the type of one that was written as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rekindle._src.text.replies.call import MalformedCall, ReplyCall, as_json

_MAX_DEPTH = 8  # levels of alternatives in a schema
MAX_SCHEMAS, MAX_CHOICES = 128, 4_096  # parts of a schema that are looked at, and values of all their enums
_TYPES: tuple[tuple[type, frozenset[str]], ...] = (
    (bool, frozenset({"boolean"})),
    (int, frozenset({"integer", "number"})),
    (float, frozenset({"number"})),
    (list, frozenset({"array"})),
    (dict, frozenset({"object"})),
    (type(None), frozenset({"null"})),
)
_NAMES_OF_PYTHON = {
    "str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object",
    "None": "null",
}  # fmt: skip
_KNOWN = frozenset().union(*(names for _, names in _TYPES), {"string"})


class Arguments:
    """Takes arguments in their order; `tell` receives each of them as a part of one JSON object."""

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self._tell = tell
        self._values: dict[str, Any] = {}
        if tell is not None:
            tell("{")

    def __len__(self) -> int:
        return len(self._values)

    def add(self, name: str, value: Any) -> None:
        """Add an argument; raises `MalformedCall` for a name that is there already."""
        if name in self._values:
            raise MalformedCall
        if self._tell is not None:
            self._tell(f"{', ' if self._values else ''}{as_json(name)}: {as_json(value)}")
        self._values[name] = value

    def call(self, name: str, id: str = "") -> ReplyCall:
        """Return the call of `name`, once all arguments are there."""
        call = ReplyCall.of(name, self._values, id=id)
        if self._tell is not None:
            self._tell("}")
        return call


def typed(text: str, schema: object, literal: Callable[[str], Any]) -> Any:
    """Return the value that a text stands for, by the argument's schema.

    It is a text if the schema says nothing else; of a union with strings, a value of another type counts if the
    schema names that type. Without types in the schema, a text of JSON is its value. `literal` reads a text of a
    value, and raises `MalformedCall` if it is none.
    """
    kinds = kinds_of(schema)
    if kinds is not None and not kinds - {"string"}:
        return text
    try:
        value = json_value(text) if kinds is None else literal(text)
    except MalformedCall:
        return text
    if kinds is None:
        return text if isinstance(value, str) else value
    return text if "string" in kinds and not fits(value, kinds) else value


def json_value(text: str) -> Any:
    """Return the value of a JSON text; raises `MalformedCall` if it has none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise MalformedCall from None


def kinds_of(schema: object) -> frozenset[str] | None:
    """Return the types that a schema allows; None if it does not say. It may have definitions of its own.

    One with more parts or values than are looked at does not say: references can make a short schema stand for any
    number of them.
    """
    return _Kinds().of(schema, None, 0)


class _Kinds:
    """Looks for the types of one schema, and counts the parts and values that it has looked at."""

    def __init__(self) -> None:
        self._schemas, self._choices = MAX_SCHEMAS, MAX_CHOICES

    def of(self, schema: object, definitions: object, depth: int) -> frozenset[str] | None:
        self._schemas -= 1
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._schemas < 0:
            return None
        definitions = schema.get("$defs", schema.get("definitions", definitions))
        if isinstance(reference := schema.get("$ref"), str):
            inner = definitions.get(reference.rpartition("/")[2]) if isinstance(definitions, Mapping) else None
            return self.of(inner, definitions, depth + 1)
        if (kinds := schema.get("type")) is not None:
            return _named_kinds(kinds, nullable=schema.get("nullable") is True)
        if isinstance(choices := schema.get("enum"), list):
            self._choices -= len(choices)
            one_of_each = {type(choice): choice for choice in choices} if self._choices >= 0 else {}
            return frozenset().union(*map(_kind, one_of_each.values())) or None
        if "const" in schema:
            return _kind(schema["const"])
        for key in ("anyOf", "oneOf"):
            if isinstance(ways := schema.get(key), list):
                return self._of_all(ways, definitions, depth + 1)
        return None

    def _of_all(self, ways: list[Any], definitions: object, depth: int) -> frozenset[str] | None:
        """Return the types of all alternatives together; None if one of them does not say."""
        together: frozenset[str] = frozenset()
        for way in ways:
            kinds = self.of(way, definitions, depth)
            if kinds is None:
                return None
            together |= kinds
        return together or None


def _named_kinds(kinds: object, *, nullable: bool) -> frozenset[str] | None:
    listed = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    if len(listed) > MAX_SCHEMAS:
        return None
    names = frozenset([_NAMES_OF_PYTHON.get(name, name) for name in listed if isinstance(name, str)])
    if not names or not names <= _KNOWN:
        return None
    return names | {"null"} if nullable else names


def _kind(value: Any) -> frozenset[str]:
    return next((names for kind, names in _TYPES if isinstance(value, kind)), frozenset({"string"}))


def fits(value: Any, kinds: frozenset[str]) -> bool:
    """True if a value, other than a text, has one of these types."""
    return not isinstance(value, str) and bool(_kind(value) & kinds)


def _refuse(word: str) -> Any:
    raise ValueError(word)
