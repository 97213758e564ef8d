"""Calls of earlier replies, as text: for templates that would leave them out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.text.replies.syntax import CallSyntax

Message = Mapping[str, Any]


def with_calls_as_text(messages: Sequence[Message], syntax: CallSyntax) -> list[Message]:
    """The messages, with an assistant's calls at the end of its content, as the model wrote them."""
    found: list[Message] = []
    for message in messages:
        calls = _calls(message) if isinstance(message, Mapping) else []
        content = message.get("content") if calls else None
        if not calls or not (content is None or isinstance(content, str)):
            found.append(message)
            continue
        said = f"{content}\n" if content else ""
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        found.append({**rest, "content": said + written(calls, syntax)})
    return found


def written(calls: Sequence[tuple[str, Mapping[str, Any]]], syntax: CallSyntax) -> str:
    """Calls in the syntax of a family."""
    if syntax.name in ("olmo", "pythonic"):
        lines = [
            f"{name}({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in given.items())})"
            for name, given in calls
        ]
        if syntax.name == "pythonic":
            return f"[{', '.join(lines)}]"
        return "\n".join(["<function_calls>", *lines, "</function_calls>"])
    key = "parameters" if syntax.name == "llama3_json" else "arguments"
    objects = [json.dumps({"name": name, key: dict(given)}, ensure_ascii=False) for name, given in calls]
    if syntax.name == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    if syntax.name == "llama3_json":
        return "; ".join(objects)
    together = f"[{', '.join(objects)}]"
    return f"[TOOL_CALLS]{together}" if syntax.name == "mistral" else f"<|tool_call|>{together}<|/tool_call|>"


def _calls(message: Message) -> list[tuple[str, Mapping[str, Any]]]:
    found: list[tuple[str, Mapping[str, Any]]] = []
    given = message.get("tool_calls")
    for call in given if isinstance(given, Sequence) and not isinstance(given, str) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                return []
        if not isinstance(function, Mapping) or not isinstance(arguments or {}, Mapping):
            return []
        found.append((str(function.get("name")), arguments or {}))
    return found
