"""Makes a chat's prompt from its arguments: the template's variables, and the reader of the reply."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rekindle._src.calls.content import PromptOptions, message_content, not_of_a_text
from rekindle._src.calls.prompts import Prompt
from rekindle._src.calls.tool_functions import Tool
from rekindle._src.capabilities.replies.request import ChatReply, ReasoningBudget
from rekindle._src.core.contracts import ChatLike, TemplateLike
from rekindle._src.dispatch.intake import LONG_TEXT
from rekindle._src.text.chat import REASONING, ChatTemplate
from rekindle._src.text.replies import ReplyFormat, ReplyPlan
from rekindle._src.text.replies.format import with_calls_as_text
from rekindle.errors import InvalidRequest

Messages = Sequence[Mapping[str, Any]]
MAX_BUDGET = 2**31 - 1  # tokens of reasoning
MAX_MESSAGE = 4_096  # characters before the end of reasoning
_BUDGETS = ("thinking_budget", "reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget")
_VALUE = 16  # the cost of a value, in characters, about


def messages_of(messages: Messages | str, content: PromptOptions | None = None) -> Messages:
    """Return the messages of a chat; a text is one of the user. The `content` joins the last message.

    Raise `InvalidRequest` for content where the last message is no text of the user.
    """
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if not content:
        return messages
    last = messages[-1] if isinstance(messages, list | tuple) and messages else {}
    text = last.get("content") if isinstance(last, Mapping) and last.get("role") == "user" else None
    if not isinstance(text, str):
        raise not_of_a_text(content)
    return [*messages[:-1], {**last, "content": message_content(text, content)}]


def chat_prompt(
    chat: ChatLike | None,
    messages: Messages,
    *,
    model: str = "",
    tools: Sequence[Tool] = (),
    documents: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    continue_final_message: bool = False,
    reasoning: bool | None = None,
    reasoning_effort: str | None = None,
    reasoning_budget: int | None = None,
    reasoning_budget_message: str | None = None,
    template_options: Mapping[str, Any] | None = None,
    stream_tool_calls: bool = False,
) -> Prompt:
    """Return the prompt of a chat, which is rendered when its request is taken in.

    Raise `InvalidRequest` for arguments that the template would ignore: tools, documents, `reasoning_effort`; and for
    a budget where the family marks no reasoning.
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
    budget = _budget(reasoning, reasoning_effort, reasoning_budget, reasoning_budget_message)
    has_switch = any(map(code.reads, ("enable_thinking", "thinking", "reasoning_effort")))
    if format.thoughts is None and (budget is not None or (reasoning is not None and not has_switch)):
        field, value = ("reasoning_budget", reasoning_budget) if reasoning is None else ("reasoning", reasoning)
        raise InvalidRequest(
            field, value, "needs a model that reasons: the chat template marks no reasoning", "Leave it out"
        )
    effort = "none" if reasoning is False else reasoning_effort
    if effort == "none" and format.thoughts is not None:
        budget = ReasoningBudget(0)
    variables = {
        **_effort(code, effort, known=budget is not None),
        **({"enable_thinking": True} if reasoning and code.reads("enable_thinking") else {}),
        **extra,
        **_variables(template_options, code),
    }
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
    return prompt.plus(ChatReply(ReplyPlan(format, schemas, continued, pieces=stream_tool_calls))).plus(budget)


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


def _effort(code: TemplateLike, effort: str | None, *, known: bool) -> dict[str, Any]:
    """Return the variables for `reasoning_effort`. With `enable_thinking` alone, reasoning can only be on or off.

    A template without either does nothing, which a budget of 0 makes `known`.
    """
    if effort is None:
        return {}
    if code.reads("enable_thinking") and (effort == "none" or not code.reads("reasoning_effort")):
        return {"enable_thinking": effort != "none"}
    if code.reads("reasoning_effort"):
        return {"reasoning_effort": effort}
    if code.reads("thinking"):  # DeepSeek's and Granite's
        return {"thinking": effort != "none"}
    if known:
        return {}
    raise _unread("reasoning_effort", effort)


def least_budget(budget: object) -> int:
    """Return the tokens of reasoning that an answer needs in addition to its own."""
    return budget if isinstance(budget, int) and 0 < budget <= MAX_BUDGET else 0


def _budget(reasoning: object, effort: object, budget: Any, message: object) -> ReasoningBudget | None:
    """Return the budget of a reply's reasoning; None if it is free."""
    if reasoning is not None and not isinstance(reasoning, bool):
        raise InvalidRequest("reasoning", reasoning, "must be True or False", "Use reasoning_budget for tokens")
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequest("reasoning_effort", effort, "is not a word", "Use 'none', 'low', 'medium' or 'high'")
    if reasoning is not None and effort is not None and reasoning == (effort == "none"):
        raise InvalidRequest("reasoning_effort", effort, f"contradicts reasoning={reasoning}", "Pass one of them")
    if reasoning is False and budget:
        raise InvalidRequest("reasoning_budget", budget, "contradicts reasoning=False", "Pass one of them")
    if budget is not None and (
        isinstance(budget, bool) or not isinstance(budget, int) or not 0 <= budget <= MAX_BUDGET
    ):
        raise InvalidRequest("reasoning_budget", budget, "is not a number of tokens", f"Use 0 to {MAX_BUDGET:,}")
    if message is not None:
        if not isinstance(message, str) or len(message) > MAX_MESSAGE:
            fix = f"Pass a text of at most {MAX_MESSAGE:,} characters"
            raise InvalidRequest("reasoning_budget_message", message, "is not a short text", fix)
        if budget is None:
            fix = "Pass reasoning_budget, too"
            raise InvalidRequest("reasoning_budget_message", message, "comes at the end of a budget", fix)
    return None if budget is None else ReasoningBudget(budget, message or "")


def _arguments(function: Callable[..., object]) -> set[str]:
    return set(inspect.signature(function).parameters)


# Arguments of a chat that reach its template anyway, so that they can't be variables as well.
_ARGUMENTS = _arguments(chat_prompt) & _arguments(ChatTemplate.prepare)


def _variables(options: Mapping[str, Any] | None, code: TemplateLike) -> Mapping[str, Any]:
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
        if name in _BUDGETS and not code.reads(name):
            fix = "Pass reasoning_budget=…, which any model with reasoning keeps to"
            raise InvalidRequest("template_options", name, "is nothing that the chat template reads", fix)
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
