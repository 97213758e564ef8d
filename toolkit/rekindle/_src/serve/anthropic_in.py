"""Anthropic's messages in the form that templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.serve.errors import wrong


def messages_of(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation. Refuse blocks other than text, thinking and tools by name."""
    messages: list[dict[str, Any]] = []
    if fields.get("system"):
        messages.append({"role": "system", "content": _text(fields["system"], "system")})
    for index, message in enumerate(fields["messages"]):
        path = f"messages[{index}].content"
        if isinstance(message["content"], str):
            messages.append({"role": message["role"], "content": message["content"]})
        elif message["role"] == "assistant":
            messages.append(_assistant(message["content"], path))
        else:
            messages += _user(message["role"], message["content"], path)
    return messages


def tools_of(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools in the form of OpenAI's API."""
    tools = []
    for index, tool in enumerate(fields.get("tools") or ()):
        if tool.get("type") not in (None, "custom"):
            fix = "Pass tools with an input_schema"
            raise wrong(f"tools[{index}].type", tool["type"], "is a tool of Anthropic's own", fix)
        function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
        if tool.get("description"):
            function["description"] = tool["description"]
        tools.append({"type": "function", "function": function})
    return tools


def _text(content: str | Sequence[Mapping[str, Any]], path: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_member(block, "text", f"{path}[{index}]") for index, block in enumerate(content))


def _member(block: Mapping[str, Any], kind: str, path: str) -> str:
    """Return the text of a block of this kind."""
    if block["type"] != kind:
        raise wrong(f"{path}.type", block["type"], "is not served here", "Send text")
    if not isinstance(block.get(kind), str):
        raise wrong(f"{path}.{kind}", block.get(kind), "is not a string", "Pass one")
    return str(block[kind])


def _assistant(blocks: Sequence[Mapping[str, Any]], path: str) -> dict[str, Any]:
    texts, reasoning, calls = [], [], []
    for index, block in enumerate(blocks):
        block_path = f"{path}[{index}]"
        if block["type"] == "thinking":
            reasoning.append(_member(block, "thinking", block_path))
        elif block["type"] == "tool_use":
            for name, kind in (("id", str), ("name", str), ("input", Mapping)):
                if not isinstance(block.get(name), kind):
                    raise wrong(
                        f"{block_path}.{name}", block.get(name), "is missing or of a wrong type", "Pass the call"
                    )
            function = {"name": block["name"], "arguments": dict(block["input"])}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif block["type"] != "redacted_thinking":
            texts.append(_member(block, "text", block_path))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(role: str, blocks: Sequence[Mapping[str, Any]], path: str) -> list[dict[str, Any]]:
    """Return a message for each tool result, and then one for the user's text."""
    results, texts = [], []
    for index, block in enumerate(blocks):
        block_path = f"{path}[{index}]"
        if block["type"] != "tool_result":
            texts.append(_member(block, "text", block_path))
            continue
        if not isinstance(block.get("tool_use_id"), str):
            raise wrong(f"{block_path}.tool_use_id", block.get("tool_use_id"), "is not a string", "Pass the call's id")
        content = _result(block.get("content"), f"{block_path}.content")
        content = f"Error: {content}" if block.get("is_error") else content
        results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
    return [*results, *([{"role": role, "content": "\n".join(texts)}] if texts or not results else [])]


def _result(content: Any, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(block, Mapping) and "type" in block for block in content):
        raise wrong(path, content, "is neither a string nor a list of blocks", "Pass one of them")
    return _text(content, path)


def arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object."""
    members: dict[str, Any] = json.loads(text or "{}")
    return members
