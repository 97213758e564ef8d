"""`tool_choice`: the tools that the model may, must or must not call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rekindle._src.core.sampling import Sampling
from rekindle._src.session.tools.tool import Tool
from rekindle._src.text.replies import ReplyFormat
from rekindle._src.text.replies.call_grammars import call_grammar
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import InvalidRequest

ToolChoice = str | Mapping[str, Any] | Callable[..., Any]


class Choice(NamedTuple):
    """The meaning of a `tool_choice` for a chat's tools."""

    value: ToolChoice | None
    shown: tuple[Tool, ...]  # to the model
    required: tuple[Tool, ...] = ()  # one of these has to be called
    parallel: bool = False  # more than one may be called


def resolve_choice(choice: ToolChoice | None, tools: Sequence[Tool], *, parallel: bool = True) -> Choice:
    """Return the choice among tools; several may be called if `parallel`. Raise `InvalidRequest` for no tool."""
    tools = tuple(tools)
    if choice is None or choice == "auto":
        return Choice(choice, tools)
    if choice == "none":
        return Choice(choice, ())
    if not tools:
        raise InvalidRequest("tool_choice", choice, "needs tools", "Pass tools=[…]")
    if choice == "required":
        return Choice(choice, tools, tools, parallel=parallel)
    matches = tuple(tool for tool in tools if _names(choice, tool))
    if not matches:
        known = ", ".join(tool.name for tool in tools)
        raise InvalidRequest(
            "tool_choice", choice, "names no tool", f"Use 'auto', 'none', 'required', or one of: {known}"
        )
    return Choice(choice, tools, matches)


def _names(choice: ToolChoice, tool: Tool) -> bool:
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = (function if isinstance(function, Mapping) else choice).get("name", "")
    return choice == tool.name or (tool.function is not None and choice == tool.function)


def forcing(choice: Choice, sampling: Sampling, format: ReplyFormat, tokenizer: object) -> Sampling:
    """Return the options of a request whose reply has to be a call, by a grammar of the family's syntax."""
    if sampling.structured:
        raise InvalidRequest(
            "tool_choice", choice.value, "can't be combined with a schema or grammar of the text", "Leave one out"
        )
    if format.calls is None or not isinstance(tokenizer, Tokenizer):
        raise InvalidRequest(
            "tool_choice", choice.value, "needs a model with a tokenizer and a chat template", "Use 'auto'"
        )
    schemas = [tool.schema for tool in choice.required]
    grammar = call_grammar(format.calls, schemas, tokenizer.added_id, several=choice.parallel)
    return dataclasses.replace(sampling, grammar=grammar)
