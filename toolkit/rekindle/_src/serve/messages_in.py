"""The messages of a chat in the form that templates read: text content, and no null fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.serve.errors import wrong


def tool_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tools` without null members. `allowed_tools` selects some of them, and its mode is the choice."""
    plain: dict[str, Any] = {}
    if "tools" in options:
        plain["tools"] = [
            {**tool, "function": {name: value for name, value in tool["function"].items() if value is not None}}
            for tool in options["tools"]
        ]
    choice = options.get("tool_choice")
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return plain
    fields = choice.get("allowed_tools", choice)  # the API of responses has its members in the choice itself
    path = "tool_choice.allowed_tools" if "allowed_tools" in choice else "tool_choice"
    mode = fields.get("mode") if isinstance(fields, Mapping) else None
    if mode not in ("auto", "required"):
        raise wrong(f"{path}.mode", mode, "is not known", "Use auto or required")
    allowed = fields.get("tools")
    if not isinstance(allowed, list) or not allowed or not all(isinstance(tool, Mapping) for tool in allowed):
        raise wrong(f"{path}.tools", allowed, "is not a list of tools", "Name one at least")
    by_name = {tool["function"]["name"]: tool for tool in plain.get("tools", ())}
    selection = []
    for index, tool in enumerate(allowed):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in by_name:
            raise wrong(f"{path}.tools[{index}]", name, "names none of the tools", f"Use one of {', '.join(by_name)}")
        selection.append(by_name[name])
    return {"tools": selection, "tool_choice": mode}


_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # part types to members


def plain_messages(messages: Sequence[Mapping[str, Any]], field: str = "messages") -> list[dict[str, Any]]:
    """Return copies of the messages with one text each. Refuse parts other than text by name."""
    copies = []
    for index, message in enumerate(messages):
        plain = {name: value for name, value in message.items() if value is not None}
        if isinstance(plain.get("content"), list):
            plain["content"] = text_of(plain["content"], f"{field}[{index}].content")
        copies.append(plain)
    return copies


def text_of(parts: Sequence[Mapping[str, Any]], path: str) -> str:
    """Return the text of content parts, joined by newlines."""
    lines = []
    for index, part in enumerate(parts):
        member = _TEXTS.get(part.get("type", ""))
        if member is None:
            raise wrong(f"{path}[{index}].type", part.get("type"), "is not served", "Send text parts only")
        if not isinstance(part.get(member), str):
            raise wrong(f"{path}[{index}].{member}", part.get(member), "is not a string", "Pass one")
        lines.append(part[member])
    return "\n".join(lines)
