"""JSON schemas of types, and what makes objects of these types from JSON.

With pydantic, whatever its TypeAdapter takes; without it, what `plain_types` converts. The objects of a type are
closed: the grammar allows no properties beyond its fields, which would be thrown away.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rekindle._src.structured import plain_types
from rekindle.errors import InvalidRequest


class Described(NamedTuple):
    """A JSON schema, and the function from a text that follows it to an object."""

    schema: Mapping[str, Any]
    parse: Callable[[str], Any]


def described(schema: Any) -> Described:
    """The JSON schema of a type; a dict is one already, whose texts become what `json.loads` makes of them."""
    if isinstance(schema, Mapping):
        return Described(schema, json.loads)
    try:
        return _of_type(schema)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _described(schema)  # such as Annotated[int, […]]


@functools.lru_cache(maxsize=256)
def _of_type(kind: Any) -> Described:
    return _described(kind)


def _described(kind: Any) -> Described:
    problem = "with pydantic installed more types are possible"
    if importlib.util.find_spec("pydantic") is not None:
        import pydantic

        try:
            adapter = pydantic.TypeAdapter(kind)
            # What the model writes is what a validator reads: aliases, and no computed fields.
            return Described(closed(adapter.json_schema(mode="validation")), adapter.validate_json)
        except Exception as error:  # classes of users take part in it, and may raise anything
            problem = str(error).strip().partition("\n")[0] or type(error).__name__
    try:
        schema = closed(plain_types.schema_of(kind))  # also before Python 3.12, where pydantic refuses TypedDicts
    except Exception as error:
        fix = "Pass its JSON schema as a dict, or a type whose values JSON can express"
        raise InvalidRequest("schema", kind, f"has no JSON schema: {error} ({problem})", fix) from None
    return Described(schema, lambda text: plain_types.build(kind, json.loads(text)))


def closed(schema: Any) -> Any:
    """A type's schema as a grammar takes it.

    Objects with named properties get additionalProperties false unless they mention it. oneOf, which pydantic writes
    for unions that a field tells apart, becomes anyOf: building the object checks the rest.
    """
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for name, part in schema.items():
        if name in _NAMED and isinstance(part, Mapping):
            found[name] = {inner: closed(value) for inner, value in part.items()}
        else:
            found["anyOf" if name == "oneOf" else name] = part if name in _DATA else closed(part)
    if "properties" in found and found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


_NAMED = frozenset(("properties", "$defs", "definitions", "patternProperties", "dependentSchemas"))
_DATA = frozenset(("const", "enum", "default", "examples", "example", "discriminator"))  # hold values, not schemas
