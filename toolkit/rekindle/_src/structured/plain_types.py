"""JSON schemas of dataclasses, TypedDicts and plain annotations, for environments without pydantic."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import pathlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

_SCALARS: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    decimal.Decimal: {"type": "number"},
    pathlib.Path: {"type": "string"},
    bytes: {"type": "string"},
    type(None): {"type": "null"},
    None: {"type": "null"},
    Any: {},
    list: {"type": "array"},
    dict: {"type": "object"},
}
_LISTS = (list, Sequence, set, frozenset)
_DICTS = (dict, Mapping)
_MOST_LEVELS = 16


class NoSchema(TypeError):
    """A type that can't be converted."""


def schema_of(kind: Any, level: int = 0) -> dict[str, Any]:
    """Return the JSON schema of an annotation. Raises `NoSchema`, which names the part without one."""
    if level > _MOST_LEVELS:
        raise NoSchema("it contains itself, or is nested too deeply")
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Annotated, Required, NotRequired):
        return schema_of(arguments[0], level)
    if origin is None and isinstance(kind, typing.Hashable) and kind in _SCALARS:
        return dict(_SCALARS[kind])
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(argument, level + 1) for argument in arguments]}
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is ...:
            return {"type": "array", "items": schema_of(arguments[0], level + 1)}
        parts = [schema_of(argument, level + 1) for argument in arguments]
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    if origin in _LISTS:
        return {"type": "array", "items": schema_of(arguments[0], level + 1)}
    if origin in _DICTS and arguments[0] is str:
        return {"type": "object", "additionalProperties": schema_of(arguments[1], level + 1)}
    if origin in _DICTS and (keys := schema_of(arguments[0], level + 1).get("enum")):
        return {"type": "object", "properties": {str(key): schema_of(arguments[1], level + 1) for key in keys}}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or typing.is_typeddict(kind)):
        hints, required = _fields(kind)
        properties = {name: schema_of(hint, level + 1) for name, hint in hints.items()}
        return {"type": "object", "properties": properties, "required": required}
    raise NoSchema(f"{kind!r} is not a dataclass, a TypedDict or a plain annotation")


def build(kind: Any, value: Any) -> Any:
    """Build an object of `kind` from the parsed JSON of a text that follows its schema."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Annotated, Required, NotRequired):
        return build(arguments[0], value)
    if origin in (Union, types.UnionType):
        for argument in arguments:
            try:
                return build(argument, value)
            except (TypeError, ValueError):
                continue
        raise ValueError(f"{value!r} fits none of {kind}")
    if origin is tuple and isinstance(value, list):
        kinds = (arguments[0],) * len(value) if len(arguments) == 2 and arguments[1] is ... else arguments
        return tuple(build(argument, part) for argument, part in zip(kinds, value, strict=True))
    if origin in _LISTS and isinstance(value, list):
        items = [build(arguments[0], part) for part in value]
        return items if origin in (list, Sequence) else origin(items)
    if origin in _DICTS and isinstance(value, dict):
        return {build(arguments[0], name): build(arguments[1], part) for name, part in value.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or typing.is_typeddict(kind)):
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is not an object")
        hints, required = _fields(kind)
        if missing := set(required) - set(value):
            raise ValueError(f"{sorted(missing)} are missing")
        return kind(**{name: build(hints[name], part) for name, part in value.items()})
    if kind is decimal.Decimal and isinstance(value, int | float) and not isinstance(value, bool):
        return decimal.Decimal(str(value))
    if kind in (pathlib.Path, bytes) and isinstance(value, str):
        return pathlib.Path(value) if kind is pathlib.Path else value.encode()
    if origin is Literal:
        fits = any(type(argument) is type(value) and argument == value for argument in arguments)
    elif kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    elif kind in (int, str, bool, list, dict):
        fits = type(value) is kind
    else:
        fits = kind is Any or value is None
    if not fits:
        raise ValueError(f"{value!r} is not of {kind}")
    return float(value) if kind is float else value


def _fields(kind: type) -> tuple[dict[str, Any], list[str]]:
    """Return annotations by name, and the names that have to be there."""
    hints = typing.get_type_hints(kind, include_extras=True)
    if not dataclasses.is_dataclass(kind):
        return hints, [name for name in hints if name in kind.__required_keys__]  # type: ignore[attr-defined]
    fields = [field for field in dataclasses.fields(kind) if field.init]
    absent = dataclasses.MISSING
    required = [field.name for field in fields if field.default is absent and field.default_factory is absent]
    return {field.name: hints[field.name] for field in fields}, required
