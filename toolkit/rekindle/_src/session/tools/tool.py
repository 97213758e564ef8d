"""The tools of a chat: functions, whose schemas are made from their signatures, or schemas."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rekindle._src.session.tools.schemas import NoSchema, convert, default_of, read_docstring, schema_of
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
    """Make a tool of a function: its name, its docstring and the types of its parameters."""
    if not callable(function):
        raise InvalidRequest("tools", function, "is neither a function nor a dict", "Pass functions or JSON schemas")
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
        except NoSchema as error:
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
