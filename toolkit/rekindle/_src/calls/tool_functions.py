"""Tools: functions and JSON schemas as chats take them, and the schemas of Python types for their parameters."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import enum
import functools
import inspect
import json
import re
import sys
import types
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rekindle.errors import InvalidRequest

ToolLike = Callable[..., Any] | Mapping[str, Any]
MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A tool's name, its JSON schema, and its function if it has one."""

    name: str
    schema: Mapping[str, Any]
    function: Callable[..., Any] | None = None
    hints: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # types of the function's parameters

    def arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the arguments of a call to the types of the function's annotations."""
        return {name: convert(self.hints.get(name, Any), value) for name, value in arguments.items()}


def tools_of(items: Sequence[ToolLike] | None) -> tuple[Tool, ...]:
    """Return the tools of a chat. Raise `InvalidRequest` for anything that is no tool."""
    if items is None:
        return ()
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Sequence):
        raise InvalidRequest("tools", items, "is not a list of tools", "Pass [function, …], or JSON schemas as dicts")
    if len(items) > MAX_TOOLS:
        raise InvalidRequest("tools", f"{len(items)} tools", f"are over {MAX_TOOLS}", "Pass fewer")
    tools = tuple(_schema_tool(item) if isinstance(item, Mapping) else function_tool(item) for item in items)
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise InvalidRequest("tools", tool.name, "is the name of two tools", "Give each another name")
        names.add(tool.name)
    return tools


def _schema_tool(schema: Mapping[str, Any]) -> Tool:
    nested = schema.get("function")
    function = nested if isinstance(nested, Mapping) else schema
    name = function.get("name")
    fix = 'Pass {"type": "function", "function": {"name": …, "description": …, "parameters": JSON schema}}'
    if not isinstance(name, str) or not name:
        raise InvalidRequest("tools", schema, "has no name", fix)
    if not isinstance(function.get("parameters", {}), Mapping):
        raise InvalidRequest("tools", schema, "has parameters that are no JSON schema", fix)
    return Tool(name, schema if function is nested else {"type": "function", "function": schema})


def function_tool(function: Any) -> Tool:
    """Make a tool of a function: its name, its docstring and the types of its parameters.

    A function with a `tool_schema` is described by that.
    """
    if not callable(function):
        raise InvalidRequest("tools", function, "is neither a function nor a dict", "Pass functions or JSON schemas")
    if isinstance(schema := getattr(function, "tool_schema", None), Mapping):
        return dataclasses.replace(_schema_tool(schema), function=function)
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__name__", type(inner).__name__)
    if not _NAME.fullmatch(name):
        raise InvalidRequest("tools", function, f"has no name that a model can call ({name})", "Use def name(…): …")
    documented = inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner).__call__
    try:
        signature = inspect.signature(function)
        hints = typing.get_type_hints(inner.__init__ if inspect.isclass(inner) else documented, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise InvalidRequest(
            "tools", function, f"has no signature that can be read ({error})", "Pass its JSON schema"
        ) from error
    description, texts = read_docstring(inner if documented is inner else type(inner))
    properties: dict[str, Any] = {}
    required = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        if parameter.kind not in _KEYWORDS:
            raise InvalidRequest(
                "tools",
                function,
                f"takes {parameter.name!r} by position, and a model calls by keyword",
                "Make it a keyword parameter",
            )
        try:
            schema = schema_of(hints.get(parameter.name, Any))
        except NoJsonSchema as error:
            raise InvalidRequest(
                "tools", function, f"has a parameter {parameter.name!r} without a JSON schema: {error}",
                "Annotate it with plain types, or pass the tool's JSON schema",
            ) from error  # fmt: skip
        if parameter.name in texts:
            schema.setdefault("description", texts[parameter.name])
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
        else:
            schema |= default_of(parameter.default)
        properties[parameter.name] = schema
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    schema = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
    return Tool(name, schema, function, hints)


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


class NoJsonSchema(Exception):
    """Raised for a type without a known JSON schema."""


def schema_of(kind: Any, depth: int = 0) -> Schema:
    """Return the schema of a type annotation. Raise `NoJsonSchema` if there is none."""
    if depth > _MOST_NESTED:
        raise NoJsonSchema(f"{_name(kind)} is nested too deeply")
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
            raise NoJsonSchema(f"{_name(kind)} has keys that are no strings")
        return {"type": "object", **({"additionalProperties": schema_of(arguments[1], depth + 1)} if arguments else {})}
    if isinstance(kind, type):
        return _class(kind, depth)
    raise NoJsonSchema(f"{_name(kind)} has no JSON schema")


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
        raise NoJsonSchema(f"{_name(kind)} has no JSON schema")
    properties = {name: schema_of(hint, depth + 1) for name, (hint, _) in hints.items()}
    required = [name for name, (_, is_required) in hints.items() if is_required]
    schema: Schema = {"type": "object", "properties": properties}
    return {**schema, "required": required} if required else schema


def fields_of(kind: type) -> dict[str, tuple[Any, bool]] | None:
    """Return the fields of a dataclass, TypedDict or NamedTuple: their types, and True for required fields."""
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
        raise NoJsonSchema(f"{values} are not all text, numbers or None")
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
    """Convert a value to the first member of a union that it is an instance of, or else to the first that takes it."""
    if any(isinstance(kind, type) and type(value) is kind for kind in kinds):
        return value
    for kind in kinds:
        try:
            return convert(kind, value)
        except (TypeError, ValueError):
            continue
    raise ValueError(f"{value!r} matches none of {', '.join(map(str, kinds))}")


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


_SECTION = re.compile(r"(?:Args|Arguments|Parameters|Params):\s*")
_OTHER = re.compile(r"[A-Z][A-Za-z ]+:\s*")  # another section of the Google style ends the parameters
_ENTRY = re.compile(r"\*{0,2}(\w++)\s*+(?:\([^)]*\)\s*+)?:\s*+(.*)")
_FIELD = re.compile(r":param\s(?:[^:]*\s)?(\w++)\s*+:\s*+(.*)")
_NUMPY = re.compile(r"\*{0,2}(\w+(?:\s*,\s*\w+)*)\s*(?::.*)?")


def read_docstring(documented: object) -> tuple[str, dict[str, str]]:
    """Return the description of the object, and its parameters' descriptions by name."""
    lines = (inspect.getdoc(documented) or "").splitlines()
    description: list[str] = []
    parameters: dict[str, str] = {}
    index = 0
    while index < len(lines):
        line = lines[index]
        field = _FIELD.fullmatch(line.strip())
        if _SECTION.fullmatch(line):
            index = _read_entries(lines, index + 1, parameters)
        elif line.strip() == "Parameters" and index + 1 < len(lines) and re.fullmatch(r"-{3,}\s*", lines[index + 1]):
            index = _read_numpy(lines, index + 2, parameters)
        elif field is not None:
            index = _read_more(lines, index + 1, parameters, field[1], field[2], 1)
        elif line.startswith(":") or _begins_section(line, lines[index + 1] if index + 1 < len(lines) else ""):
            break
        else:
            description.append(line)
            index += 1
    return " ".join("\n".join(description).split()), parameters


def _begins_section(line: str, below: str) -> bool:
    return bool(_OTHER.fullmatch(line) and below[:1] == " ") or re.fullmatch(r"-{3,}\s*", below) is not None


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _read_more(lines: list[str], index: int, entries: dict[str, str], name: str, text: str, least: int) -> int:
    """Add an entry with the lines that are indented below it. Return the index of the next entry."""
    parts = [text]
    while index < len(lines) and lines[index].strip() and _indent(lines[index]) >= least:
        parts.append(lines[index].strip())
        index += 1
    entries[name] = " ".join(" ".join(parts).split())
    return index


def _read_entries(lines: list[str], index: int, entries: dict[str, str]) -> int:
    base = None
    while index < len(lines) and (not lines[index].strip() or _indent(lines[index]) > 0):
        if not lines[index].strip():
            index += 1
            continue
        base = _indent(lines[index]) if base is None else base
        entry = _ENTRY.fullmatch(lines[index].strip())
        if entry is None or _indent(lines[index]) != base:
            index += 1
            continue
        index = _read_more(lines, index + 1, entries, entry[1], entry[2], base + 1)
    return index


def _read_numpy(lines: list[str], index: int, entries: dict[str, str]) -> int:
    while index < len(lines):
        if not lines[index].strip():
            index += 1
            continue
        if index + 1 < len(lines) and re.fullmatch(r"-{3,}\s*", lines[index + 1]):
            return index  # the next section
        entry = _NUMPY.fullmatch(lines[index])
        if entry is None:
            return index
        names: dict[str, str] = {}
        index = _read_more(lines, index + 1, names, entry[1], "", 1)
        for name in entry[1].split(","):
            entries[name.strip()] = names[entry[1]]
    return index
