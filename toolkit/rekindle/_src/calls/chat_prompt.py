"""Makes a chat's prompt from its arguments: the template's variables, and the reader of the reply."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rekindle._src.calls.pictures import parts_of
from rekindle._src.calls.prompts import Prompt
from rekindle._src.calls.tool_functions import Tool
from rekindle._src.capabilities.replies.request import ChatReply
from rekindle._src.core.contracts import ChatLike, TemplateLike
from rekindle._src.dispatch.intake import LONG_TEXT
from rekindle._src.text.chat import REASONING, ChatTemplate
from rekindle._src.text.replies import ReplyFormat, ReplyPlan
from rekindle._src.text.replies.format import with_calls_as_text
from rekindle.errors import InvalidRequest

Messages = Sequence[Mapping[str, Any]]
_SHORT = [{"role": "user", "content": "Hello"}]  # whose prompt ends as that of any chat
_VALUE = 16  # the cost of a value, in characters, about


def messages_of(messages: Messages | str, images: Any = None) -> Messages:
    """Return the messages of a chat; a text is one of the user. `images` become parts of the last message.

    Raise `InvalidRequest` for images where the last message is no text of the user.
    """
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if images is None:
        return messages
    last = messages[-1] if isinstance(messages, list | tuple) and messages else {}
    text = last.get("content") if isinstance(last, Mapping) and last.get("role") == "user" else None
    if not isinstance(text, str):
        fix = "Write them into a message: {'role': 'user', 'content': [{'type': 'image', 'image': picture}, …]}"
        raise InvalidRequest("images", images, "are those of the last message, which is no text of the user", fix)
    pictures = [*images] if isinstance(images, list | tuple) else [images]
    return [*messages[:-1], {**last, "content": parts_of(text, pictures)}]


def chat_prompt(
    chat: ChatLike | None,
    messages: Messages,
    *,
    model: str = "",
    tools: Sequence[Tool] = (),
    documents: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    continue_final_message: bool = False,
    reasoning_effort: str | None = None,
    template_options: Mapping[str, Any] | None = None,
    stream_tool_calls: bool = False,
    forced: bool = False,
) -> Prompt:
    """Return the prompt of a chat, which is rendered when its request is taken in.

    With `forced`, its reply has to call a tool, and the plan of the reply says if the prompt ends inside of reasoning.

    Raise `InvalidRequest` for arguments that the template would ignore: tools, documents, `reasoning_effort`.
    """
    if chat is None:
        if template is None:
            raise InvalidRequest(
                "model",
                model,
                "has no chat template: it is a base model, which continues texts, or its files leave the template out",
                "Use session.generate(prompt), or pass a template of Jinja's as template=…",
            )
        chat = ChatTemplate({})
    code = chat.code(template, tools=bool(tools))
    format = chat.reply_format(template, tools=bool(tools))
    assert isinstance(format, ReplyFormat), "a chat template says so"
    if tools and (format.calls is None or not code.takes_tools):
        raise _unread("tools", [tool.name for tool in tools])
    if documents is not None and not code.reads("documents"):
        raise _unread("documents", documents)
    originals, schemas = messages, tuple(tool.schema for tool in tools)
    continued = _last_text(messages) if continue_final_message else None
    if format.calls is not None and not code.reads_calls and isinstance(messages, list | tuple):
        messages = with_calls_as_text(messages, format.calls)
    if format.in_channels and isinstance(messages, list | tuple):
        messages = [_with_thoughts_alone(message) for message in messages]
    extra: dict[str, Any] = {}
    if schemas and not code.reads("tools"):  # SmolLM3's and Phi-4-mini's templates take functions by other ways
        functions = [schema.get("function", schema) for schema in schemas]
        if code.reads("xml_tools"):
            extra = {"xml_tools": functions}
        else:
            messages = _with_tools(messages, json.dumps(functions, ensure_ascii=False))
    variables = {**_effort(code, reasoning_effort), **extra, **_variables(template_options)}
    render = chat.prepare(
        messages,
        tools=schemas or None,
        documents=documents,
        template=template,
        continue_final_message=continue_final_message,
        **variables,
    )
    # The template writes special tokens itself.
    long = _is_long([originals, schemas, documents, template_options])
    prompt = Prompt(None, None, add_special_tokens=False, render=render, messages=originals, long=long)
    if not (schemas or format.has_parts):
        return prompt
    thinks = None
    if forced and format.reasoning is not None:
        short = chat.prepare(_SHORT, tools=schemas or None, documents=documents, template=template, **variables)
        with contextlib.suppress(InvalidRequest):  # the chat's own messages may suit the template better
            thinks = format.thinks_after(short(), continued)
    return prompt.plus(ChatReply(ReplyPlan(format, schemas, continued, thinks, pieces=stream_tool_calls)))


def _with_thoughts_alone(message: Any) -> Any:
    """Return a message without its content if it has thoughts and a call as well.

    Templates of harmony take either thoughts or content along with a call.
    """
    if not isinstance(message, Mapping) or not (message.get("tool_calls") and message.get("content")):
        return message
    if not any(message.get(name) for name in REASONING):
        return message
    return {key: value for key, value in message.items() if key != "content"}


def _is_long(value: Any) -> bool:
    """True if rendering the value takes more than a few milliseconds."""
    budget, todo = LONG_TEXT, [value]
    while todo and budget > 0:
        item = todo.pop()
        budget -= len(item) if isinstance(item, str) else _VALUE
        if isinstance(item, Mapping):
            todo += item.values()
        elif isinstance(item, list | tuple):
            todo += item[:LONG_TEXT]
    return budget <= 0


def _effort(code: TemplateLike, effort: str | None) -> dict[str, Any]:
    """Return the variables for `reasoning_effort`. With `enable_thinking` alone, reasoning can only be on or off."""
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise InvalidRequest("reasoning_effort", effort, "is not a word", "Use 'none', 'low', 'medium' or 'high'")
    if code.reads("reasoning_effort"):
        return {"reasoning_effort": effort}
    if code.reads("enable_thinking"):
        return {"enable_thinking": effort != "none"}
    raise _unread("reasoning_effort", effort)


def _arguments(function: Callable[..., object]) -> set[str]:
    return set(inspect.signature(function).parameters)


# Arguments of a chat that reach its template anyway, so that they can't be variables as well.
_ARGUMENTS = _arguments(chat_prompt) & _arguments(ChatTemplate.prepare)


def _variables(options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the variables for a template; they override the variables that `reasoning_effort` sets."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise InvalidRequest(
            "template_options", options, "are not variables by name", 'Pass {"enable_thinking": False}'
        )
    for name in options:
        if name in _ARGUMENTS:
            raise InvalidRequest("template_options", name, "is an argument of its own", f"Pass {name}=… in its place")
    return options


def _with_tools(messages: Messages, tools: str) -> Messages:
    """Return the messages with the tools in the system message."""
    if not messages:
        return messages
    first, *rest = messages
    if isinstance(first, Mapping) and first.get("role") == "system":
        return [{**first, "tools": tools}, *rest]
    return [{"role": "system", "content": "", "tools": tools}, *messages]


def _unread(field: str, value: object) -> InvalidRequest:
    return InvalidRequest(
        field, value, "is nothing that the model's chat template reads", "Leave it out, or pass another template=…"
    )


def _last_text(messages: Messages) -> str:
    content = messages[-1].get("content")
    if isinstance(content, str):
        return content
    parts = [part.get("text") for part in content or () if isinstance(part, Mapping)]
    return next((part for part in reversed(parts) if isinstance(part, str)), "")
