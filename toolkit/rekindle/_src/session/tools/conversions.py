"""Conversion of a call's JSON arguments to the types of a function's annotations."""

from __future__ import annotations

import collections.abc
import datetime
import enum
import types
import typing
import uuid
from pathlib import PurePath
from typing import Any

from rekindle._src.session.tools.schemas import fields_of


def convert(kind: Any, value: Any) -> Any:
    """Convert `value` to `kind`: dataclasses, enums, sets, dates and numbers that the model wrote as text.

    A value of any other kind stays as it is. A value that contradicts the annotation raises ValueError or TypeError.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return convert(arguments[0], value)
    if origin in (typing.Union, types.UnionType):
        return _member(arguments, value)
    base = origin or kind
    if base in (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Set) and isinstance(value, list):
        return _items(base, arguments, value)
    if base in (dict, collections.abc.Mapping) and isinstance(value, dict):
        return {key: convert(arguments[1], item) for key, item in value.items()} if arguments else value
    return _single(base, value) if isinstance(base, type) else value


def _items(base: Any, arguments: tuple[Any, ...], value: list[Any]) -> Any:
    if base is tuple and arguments and arguments[-1] is not Ellipsis:
        kinds: list[Any] = list(arguments)
        if len(kinds) != len(value):
            raise ValueError(f"{len(value)} items where {len(kinds)} are expected")
    else:
        kinds = [arguments[0] if arguments else Any] * len(value)
    items = [convert(kind, item) for kind, item in zip(kinds, value, strict=True)]
    collection = {tuple: tuple, set: set, frozenset: frozenset, collections.abc.Set: set}.get(base, list)
    return collection(items)


def _member(kinds: tuple[Any, ...], value: Any) -> Any:
    """Convert a value to the first member of a union whose instance it is, or else to the first that takes it."""
    if any(isinstance(kind, type) and type(value) is kind for kind in kinds):
        return value
    for kind in kinds:
        try:
            return convert(kind, value)
        except (TypeError, ValueError):
            continue
    raise ValueError(f"{value!r} is none of {', '.join(map(str, kinds))}")


def _single(kind: type, value: Any) -> Any:
    if hasattr(kind, "model_validate"):  # a pydantic model
        return kind.model_validate(value)
    if issubclass(kind, enum.Enum):
        return kind(value)
    if kind in (int, float) and isinstance(value, str):
        return kind(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is float and type(value) is int:
        return float(value)
    if kind is bool and value in ("true", "false", "True", "False"):
        return value in ("true", "True")
    if isinstance(value, str):
        if kind in (datetime.datetime, datetime.date, datetime.time):
            return kind.fromisoformat(value)  # type: ignore[attr-defined]
        if kind is uuid.UUID or issubclass(kind, PurePath):
            return kind(value)
    if kind is type(None) and value is not None:
        raise ValueError(f"{value!r} is not None")
    if isinstance(value, dict) and kind is not dict and (fields := fields_of(kind)) is not None:
        values = {name: convert(fields[name][0], item) if name in fields else item for name, item in value.items()}
        return values if typing.is_typeddict(kind) else kind(**values)
    return value
