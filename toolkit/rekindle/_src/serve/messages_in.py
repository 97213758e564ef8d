"""The messages of a chat as templates read them: text content, and no fields that are null."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.serve.errors import wrong


def tool_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """`tools` without members that are null, and only those that an `allowed_tools` names; its mode is the choice."""
    found: dict[str, Any] = {}
    if "tools" in options:
        found["tools"] = [
            {**tool, "function": {name: one for name, one in tool["function"].items() if one is not None}}
            for tool in options["tools"]
        ]
    choice = options.get("tool_choice")
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return found
    inner = choice.get("allowed_tools", choice)  # in responses its members are those of the choice itself
    path = "tool_choice.allowed_tools" if "allowed_tools" in choice else "tool_choice"
    mode = inner.get("mode") if isinstance(inner, Mapping) else None
    if mode not in ("auto", "required"):
        raise wrong(f"{path}.mode", mode, "is not known", "Use auto or required")
    listed = inner.get("tools")
    if not isinstance(listed, list) or not listed or not all(isinstance(tool, Mapping) for tool in listed):
        raise wrong(f"{path}.tools", listed, "is not a list of tools", "Name one at least")
    known = {tool["function"]["name"]: tool for tool in found.get("tools", ())}
    chosen = []
    for index, tool in enumerate(listed):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in known:
            raise wrong(f"{path}.tools[{index}]", name, "names none of the tools", f"Use one of {', '.join(known)}")
        chosen.append(known[name])
    return {"tools": chosen, "tool_choice": mode}


_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # part types to members


def plain_messages(messages: Sequence[Mapping[str, Any]], field: str = "messages") -> list[dict[str, Any]]:
    """Copies of the messages, each with one text; parts other than text are refused by name."""
    found = []
    for index, message in enumerate(messages):
        plain = {name: value for name, value in message.items() if value is not None}
        if isinstance(plain.get("content"), list):
            plain["content"] = text_of(plain["content"], f"{field}[{index}].content")
        found.append(plain)
    return found


def text_of(parts: Sequence[Mapping[str, Any]], path: str) -> str:
    """The text of content parts, in lines."""
    lines = []
    for index, part in enumerate(parts):
        member = _TEXTS.get(part.get("type", ""))
        if member is None:
            raise wrong(f"{path}[{index}].type", part.get("type"), "is not served", "Send text parts only")
        if not isinstance(part.get(member), str):
            raise wrong(f"{path}[{index}].{member}", part.get(member), "is not a string", "Pass one")
        lines.append(part[member])
    return "\n".join(lines)
