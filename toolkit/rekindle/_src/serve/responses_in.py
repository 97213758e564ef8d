"""The items of a request for a response as messages in the form that templates read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rekindle._src.serve.errors import missing, wrong
from rekindle._src.serve.messages_in import text_of

_ROLES = ("user", "assistant", "system", "developer")


Find = Callable[[str, str], Mapping[str, Any]]  # an item by its id; the path is of the field with the id


def messages_of(fields: Mapping[str, Any], find: Find | None = None) -> list[dict[str, Any]]:
    """Return the conversation. Consecutive reasoning, text and calls become one message of the assistant."""
    messages: list[dict[str, Any]] = []
    if fields.get("instructions"):
        messages.append({"role": "system", "content": fields["instructions"]})
    items = fields["input"]
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for index, item in enumerate(items):
        path = f"input[{index}]"
        if item.get("type") == "item_reference" and find is not None:
            item = find(_text(item, "id", path), f"{path}.id")
        match item.get("type", "message"):
            case "message":
                _message(messages, item, path)
            case "reasoning":
                _assistant(messages)["reasoning_content"] = _thoughts(item, path)
            case "function_call":
                function = {name: _text(item, name, path) for name in ("name", "arguments")}
                call = {"id": _text(item, "call_id", path), "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = item.get("output")
                text = text_of(_parts(output, f"{path}.output"), f"{path}.output") if isinstance(output, list) else None
                text = _text(item, "output", path) if text is None else text
                messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", path), "content": text})
            case kind:
                raise wrong(f"{path}.type", kind, "is not served here", "Send messages, reasoning and function calls")
    return messages


def _message(messages: list[dict[str, Any]], item: Mapping[str, Any], path: str) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise wrong(f"{path}.role", role, "is not known", f"Use one of {', '.join(_ROLES)}")
    if isinstance(content, list):
        content = text_of(_parts(content, f"{path}.content"), f"{path}.content")
    if not isinstance(content, str):
        raise wrong(f"{path}.content", content, "is neither a string nor a list of parts", "Pass one of them")
    if role != "assistant":
        messages.append({"role": role, "content": content})
        return
    message = _assistant(messages)
    message["content"] = f"{message['content']}\n{content}" if message["content"] else content


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message at the end, to which items are added. Append one if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _thoughts(item: Mapping[str, Any], path: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise wrong(f"{path}.content", parts, "is not a list of parts", "Pass one")
    return "\n".join(_text(part, "text", f"{path}.content") for part in _parts(parts, f"{path}.content"))


def _parts(parts: Sequence[Any], path: str) -> Sequence[Mapping[str, Any]]:
    for index, part in enumerate(parts):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise wrong(f"{path}[{index}]", part, "is not a part with a type", "Pass {'type': 'input_text', …}")
    return parts


def _text(item: Mapping[str, Any], name: str, path: str) -> str:
    if not isinstance(item.get(name), str):
        raise wrong(f"{path}.{name}", item.get(name), "is not a string", "Pass one")
    return str(item[name])


def tools_of(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the functions in the form of chat completions. Refuse tools that run at OpenAI by name."""
    tools = []
    for index, tool in enumerate(fields.get("tools") or ()):
        if tool["type"] != "function":
            raise wrong(f"tools[{index}].type", tool["type"], "does not run here", "Pass functions")
        if not tool.get("name"):
            raise missing(f"tools[{index}].name")
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return tools


def choice_of(fields: Mapping[str, Any]) -> Any:
    """Return `tool_choice` in the form of chat completions."""
    choice = fields.get("tool_choice")
    if isinstance(choice, Mapping):
        if choice.get("type") == "allowed_tools":
            return choice
        if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
            raise wrong("tool_choice", choice, "is not a function", 'Pass {"type": "function", "name": …}')
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice not in (None, "auto", "none", "required"):
        raise wrong("tool_choice", choice, "is not known", "Use auto, none, required, or a function")
    return choice
