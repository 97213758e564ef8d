"""JSON schemas of types, and functions that make objects of these types from JSON.

With pydantic, any type that its TypeAdapter takes; without it, those that `plain_types` converts. The objects of a type
are closed: the grammar allows no properties beyond its fields, which would be thrown away. Rules that it can't express,
such as that the items of a set differ, are left out, since building the object checks them.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rekindle._src.structured import plain_types
from rekindle.errors import InvalidRequest


class TypeSchema(NamedTuple):
    """A JSON schema, and the function from a text that follows it to an object."""

    schema: Mapping[str, Any]
    parse: Callable[[str], Any]
    checks: bool = False  # True if `parse` refuses texts that break the schema


def type_schema(schema: Any) -> TypeSchema:
    """Return the JSON schema of a type. A dict is a schema already; its texts are parsed with `json.loads`."""
    if isinstance(schema, Mapping):
        return TypeSchema(schema, json.loads)
    try:
        return _cached_type_schema(schema)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _type_schema(schema)  # such as Annotated[int, […]]


@functools.lru_cache(maxsize=256)
def _cached_type_schema(kind: Any) -> TypeSchema:
    return _type_schema(kind)


def _type_schema(kind: Any) -> TypeSchema:
    problem = "with pydantic installed more types are possible"
    if importlib.util.find_spec("pydantic") is not None:
        import pydantic

        try:
            adapter = pydantic.TypeAdapter(kind)
            # The model writes the input of a validator: aliases, and no computed fields.
            schema = adapter.json_schema(mode="validation", schema_generator=_generator())
            return TypeSchema(closed(schema), adapter.validate_json, checks=True)
        except Exception as error:  # classes of users take part in it, and may raise anything
            problem = str(error).strip().partition("\n")[0] or type(error).__name__
    try:
        schema = closed(plain_types.schema_of(kind))  # also before Python 3.12, where pydantic refuses TypedDicts
    except Exception as error:
        fix = "Pass its JSON schema as a dict, or a type whose values JSON can express"
        raise InvalidRequest("schema", kind, f"has no JSON schema: {error} ({problem})", fix) from None
    return TypeSchema(schema, lambda text: plain_types.build(kind, json.loads(text)), checks=True)


@functools.cache
def _generator() -> Any:
    """Return pydantic's schema generator, but with Decimals as numbers only, where pydantic allows any text as well."""
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):  # type: ignore[misc,unused-ignore]
        def decimal_schema(self, schema: Any) -> Any:
            written = super().decimal_schema(schema)
            return next((part for part in written.get("anyOf", ()) if part.get("type") == "number"), written)

    return Generator


def closed(schema: Any) -> Any:
    """Return a type's schema in the form that grammars take.

    Objects with named properties get additionalProperties false unless they mention it. oneOf, which pydantic writes
    for unions that a field tells apart, becomes anyOf: building the object checks the rest. Keys that are of an
    enumeration become optional properties, and base64 a pattern.
    """
    return _closed(schema, (schema.get("$defs") or {}) if isinstance(schema, Mapping) else {})


def _closed(schema: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_closed(part, definitions) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for name, part in schema.items():
        if name in _NAMED and isinstance(part, Mapping):
            result[name] = {inner: _closed(value, definitions) for inner, value in part.items()}
        else:
            result["anyOf" if name == "oneOf" else name] = part if name in _DATA else _closed(part, definitions)
    names = result.get("propertyNames")
    if isinstance(names, Mapping) and "properties" not in result:
        keys = definitions.get(str(names.get("$ref", "")).removeprefix("#/$defs/"), names).get("enum", ())
        if keys and all(isinstance(key, str) for key in keys):
            del result["propertyNames"]
            result["properties"] = dict.fromkeys(keys, result.pop("additionalProperties", {}))
    if "properties" in result and result.get("type") == "object":
        result.setdefault("additionalProperties", False)
    if result.get("type") == "string" and result.get("format") in _BASE64:
        result.setdefault("pattern", _BASE64[result.pop("format")])
    return result


_NAMED = frozenset(("properties", "$defs", "definitions", "patternProperties", "dependentSchemas"))
_DATA = frozenset(("const", "enum", "default", "examples", "example", "discriminator"))  # hold values, not schemas
_BASE64 = {
    name: f"^([{letters}]{{4}})*([{letters}]{{2}}==|[{letters}]{{3}}=)?$"
    for name, letters in (("base64", "A-Za-z0-9+/"), ("base64url", "A-Za-z0-9_-"))
}
