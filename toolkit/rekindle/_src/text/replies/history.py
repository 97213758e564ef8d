"""Calls of earlier replies, as text: for templates that would leave them out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.text.replies.syntax import CallSyntax

Message = Mapping[str, Any]


def with_calls_as_text(messages: Sequence[Message], syntax: CallSyntax) -> list[Message]:
    """Return the messages, with an assistant's calls as text at the end of its content, as the model wrote them."""
    result: list[Message] = []
    for message in messages:
        calls = _calls(message) if isinstance(message, Mapping) else []
        content = message.get("content") if calls else None
        if not calls or not (content is None or isinstance(content, str)):
            result.append(message)
            continue
        text = f"{content}\n" if content else ""
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        result.append({**rest, "content": text + format_calls(calls, syntax)})
    return result


def format_calls(calls: Sequence[tuple[str, Mapping[str, Any]]], syntax: CallSyntax) -> str:
    """Return calls in the syntax of a family."""
    if syntax.name in ("olmo", "pythonic"):
        lines = [
            f"{name}({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in arguments.items())})"
            for name, arguments in calls
        ]
        if syntax.name == "pythonic":
            return f"[{', '.join(lines)}]"
        return "\n".join(["<function_calls>", *lines, "</function_calls>"])
    key = "parameters" if syntax.name == "llama3_json" else "arguments"
    objects = [json.dumps({"name": name, key: dict(arguments)}, ensure_ascii=False) for name, arguments in calls]
    if syntax.name == "hermes":
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects)
    if syntax.name == "llama3_json":
        return "; ".join(objects)
    together = f"[{', '.join(objects)}]"
    return f"[TOOL_CALLS]{together}" if syntax.name == "mistral" else f"<|tool_call|>{together}<|/tool_call|>"


def _calls(message: Message) -> list[tuple[str, Mapping[str, Any]]]:
    calls: list[tuple[str, Mapping[str, Any]]] = []
    entries = message.get("tool_calls")
    for call in entries if isinstance(entries, Sequence) and not isinstance(entries, str) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                return []
        if not isinstance(function, Mapping) or not isinstance(arguments or {}, Mapping):
            return []
        calls.append((str(function.get("name")), arguments or {}))
    return calls
