"""JSON schemas of Python types, for the parameters of tools."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import enum
import inspect
import json
import sys
import types
import typing
import uuid
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

Schema = dict[str, Any]
_PLAIN: dict[object, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    None: {"type": "null"},
    Any: {},
    object: {},
    inspect.Parameter.empty: {},
    datetime.datetime: {"type": "string", "format": "date-time"},
    datetime.date: {"type": "string", "format": "date"},
    datetime.time: {"type": "string", "format": "time"},
    uuid.UUID: {"type": "string", "format": "uuid"},
}
_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_SETS = (set, frozenset, collections.abc.Set)
_DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_MOST_NESTED = 16


class NoSchema(Exception):
    """Raised for a type without a known JSON schema."""


def schema_of(kind: Any, depth: int = 0) -> Schema:
    """Return the schema of a type annotation. Raise `NoSchema` if there is none."""
    if depth > _MOST_NESTED:
        raise NoSchema(f"{_name(kind)} is nested too deeply")
    try:
        if kind in _PLAIN:
            return dict(_PLAIN[kind])
    except TypeError:  # an annotation that can't be hashed
        pass
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _annotated(arguments[0], arguments[1:], depth)
    if origin is typing.Literal:
        return _values(arguments)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, depth)
    base = origin or kind
    if base is tuple and arguments and arguments[-1] is not Ellipsis:
        items = [schema_of(item, depth + 1) for item in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if base in _LISTS or base in _SETS or base is tuple:
        schema: Schema = {"type": "array"}
        if arguments:
            schema["items"] = schema_of(arguments[0], depth + 1)
        return {**schema, "uniqueItems": True} if base in _SETS else schema
    if base in _DICTS:
        if arguments and arguments[0] not in (str, Any):
            raise NoSchema(f"{_name(kind)} has keys that are no strings")
        return {"type": "object", **({"additionalProperties": schema_of(arguments[1], depth + 1)} if arguments else {})}
    if isinstance(kind, type):
        return _class(kind, depth)
    raise NoSchema(f"{_name(kind)} has no JSON schema")


def _class(kind: type, depth: int) -> Schema:
    if hasattr(kind, "model_json_schema"):  # a pydantic model
        return dict(kind.model_json_schema())
    if issubclass(kind, enum.Enum):
        return _values(tuple(member.value for member in kind))
    if issubclass(kind, PurePath):
        return {"type": "string"}
    hints = fields_of(kind)
    if hints is None:
        pydantic = sys.modules.get("pydantic")
        if pydantic is not None:
            try:
                return dict(pydantic.TypeAdapter(kind).json_schema())
            except Exception:
                pass
        raise NoSchema(f"{_name(kind)} has no JSON schema")
    properties = {name: schema_of(hint, depth + 1) for name, (hint, _) in hints.items()}
    required = [name for name, (_, is_required) in hints.items() if is_required]
    schema: Schema = {"type": "object", "properties": properties}
    return {**schema, "required": required} if required else schema


def fields_of(kind: type) -> dict[str, tuple[Any, bool]] | None:
    """Return the fields of a dataclass, TypedDict or NamedTuple: their types, and True for those that are required."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {
            field.name: (
                hints[field.name],
                field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
            )
            for field in dataclasses.fields(kind)
            if field.init
        }
    if typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {name: _key(hint, name in kind.__required_keys__) for name, hint in hints.items()}  # type: ignore[attr-defined]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind, include_extras=True)
        defaults = getattr(kind, "_field_defaults", {})
        return {name: (hints.get(name, Any), name not in defaults) for name in kind._fields}
    return None


def _key(hint: Any, needed: bool) -> tuple[Any, bool]:
    """Return the type of a TypedDict's key, and True if it is required.

    Where annotations are text, only the annotation itself says whether the key is required.
    """
    origin = typing.get_origin(hint)
    if origin in (typing.Required, typing.NotRequired):
        return typing.get_args(hint)[0], origin is typing.Required
    return hint, needed


def _annotated(kind: Any, extras: tuple[Any, ...], depth: int) -> Schema:
    """Return the schema of an `Annotated[int, "text"]`; the text, or the `description` of a `Field`, describes it."""
    schema = schema_of(kind, depth)
    for extra in extras:
        text = extra if isinstance(extra, str) else getattr(extra, "description", None)
        if isinstance(text, str):
            schema["description"] = text
        elif isinstance(extra, Mapping):
            schema |= extra
    return schema


def _values(values: tuple[Any, ...]) -> Schema:
    kinds = list(dict.fromkeys(_PLAIN.get(type(value), {}).get("type") for value in values))
    if None in kinds:
        raise NoSchema(f"{values} are not all text, numbers or None")
    schema: Schema = {"enum": list(values)}
    return {"type": kinds[0] if len(kinds) == 1 else kinds, **schema}


def _union(members: tuple[Any, ...], depth: int) -> Schema:
    schemas = [schema_of(member, depth + 1) for member in members]
    if all(set(schema) == {"type"} for schema in schemas):
        return {"type": [schema["type"] for schema in schemas]}
    return {"anyOf": schemas}


def default_of(value: object) -> Schema:
    """Return `{"default": value}` if a schema can hold the value, else an empty schema."""
    if isinstance(value, enum.Enum):
        value = value.value
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return {}
    return {"default": value}


def _name(kind: Any) -> str:
    return kind.__qualname__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
