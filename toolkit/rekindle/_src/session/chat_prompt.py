"""From a chat's arguments to its prompt: what the template is given, and how the reply is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.core.contracts import ChatLike
from rekindle._src.session.prompts import Prompt
from rekindle._src.session.tools.tool import Tool
from rekindle._src.text.replies import ReplyFormat, ReplyPlan
from rekindle.errors import InvalidRequest

Messages = Sequence[Mapping[str, Any]]


def chat_prompt(
    chat: ChatLike | None,
    messages: Messages,
    *,
    tools: Sequence[Tool] = (),
    documents: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    continue_final_message: bool = False,
    reasoning_effort: str | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> Prompt:
    """The prompt of a chat, which is rendered when its request is taken in.

    What the template would pass over in silence is refused: tools, documents, `reasoning_effort`.
    """
    if chat is None:
        raise InvalidRequest(
            "messages", len(messages), "need a chat template, and the model brings none", "Use generate(prompt)"
        )
    text = chat.text(template, tools=bool(tools))
    format = ReplyFormat.of_template(text)
    if tools and format.calls is None:
        raise _unread("tools", [tool.name for tool in tools])
    if documents is not None and not _reads(text, "documents"):
        raise _unread("documents", documents)
    schemas = tuple(tool.schema for tool in tools)
    render = chat.prepare(
        messages,
        tools=schemas or None,
        documents=documents,
        template=template,
        continue_final_message=continue_final_message,
        **_effort(text, reasoning_effort),
        **(template_options or {}),
    )
    continued = _last_text(messages) if continue_final_message else None
    reply = ReplyPlan(format, schemas, continued) if schemas or format.reasoning is not None else None
    # The template writes special tokens itself.
    return Prompt(None, None, add_special_tokens=False, render=render, reply=reply)


def _effort(text: str, effort: str | None) -> dict[str, Any]:
    """Variables for `reasoning_effort`; a template that only knows `enable_thinking` can turn reasoning on or off."""
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise InvalidRequest("reasoning_effort", effort, "is not a word", "Use 'none', 'low', 'medium' or 'high'")
    if _reads(text, "reasoning_effort"):
        return {"reasoning_effort": effort}
    if _reads(text, "enable_thinking"):
        return {"enable_thinking": effort != "none"}
    raise _unread("reasoning_effort", effort)


def _reads(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


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
