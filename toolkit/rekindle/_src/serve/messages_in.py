"""The messages of a chat as templates read them: text content, and no fields that are null."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.serve.errors import wrong

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
