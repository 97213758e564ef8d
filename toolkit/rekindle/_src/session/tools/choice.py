"""`tool_choice`: whether the model may, must or must not call tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rekindle._src.session.tools.tool import Tool
from rekindle.errors import InvalidRequest

ToolChoice = str | Mapping[str, Any] | Callable[..., Any]
_FIX = "Use 'auto' or 'none'"


def chosen(choice: ToolChoice | None, tools: Sequence[Tool]) -> Sequence[Tool]:
    """The tools that the model is shown."""
    if choice is None or choice == "auto":
        return tools
    if choice == "none":
        return ()
    raise InvalidRequest("tool_choice", choice, "needs structured output, which this version does not have", _FIX)
