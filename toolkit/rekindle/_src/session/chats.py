"""The part of a session that chats: messages in, a reply out, with tools that the model may call."""

# 1 is an int: this overlap is meant, and the overload that is taken stands first.
# mypy: disable-error-code="overload-overlap"
# pyright: reportOverlappingOverload=false

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from rekindle._src.core.contracts import ChatLike
from rekindle._src.core.options import takes_options
from rekindle._src.core.records import Completion
from rekindle._src.core.sampling import ANSWER_TOKENS, Sampling, SamplingOptions
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.host import Host
from rekindle._src.dispatch.intake import LONG_TEXT
from rekindle._src.session.handle import Handle
from rekindle._src.session.prompts import Prompt
from rekindle._src.session.requests import sampling_of, structure_in
from rekindle._src.session.tool_functions import Tool
from rekindle._src.text.chat import REASONING, ChatTemplate
from rekindle._src.text.replies import ReplyFormat, ReplyPlan
from rekindle._src.text.replies.format import reads, reads_calls, takes_tools, with_calls_as_text
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.session.conversation import Conversation
    from rekindle._src.session.tool_functions import ToolLike
    from rekindle._src.session.tool_loop import ToolChoice, ToolLoop


Messages = Sequence[Mapping[str, Any]]
_VALUE = 16  # the cost of a value, in characters, about


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
) -> Prompt:
    """Return the prompt of a chat, which is rendered when its request is taken in.

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
    text = chat.text(template, tools=bool(tools))
    format = ReplyFormat.of_template(text)
    if tools and (format.calls is None or not takes_tools(text)):
        raise _unread("tools", [tool.name for tool in tools])
    if documents is not None and not reads(text, "documents"):
        raise _unread("documents", documents)
    originals, schemas = messages, tuple(tool.schema for tool in tools)
    continued = _last_text(messages) if continue_final_message else None
    if format.calls is not None and not reads_calls(text) and isinstance(messages, list | tuple):
        messages = with_calls_as_text(messages, format.calls)
    if format.in_channels and isinstance(messages, list | tuple):
        messages = [_with_thoughts_alone(message) for message in messages]
    extra: dict[str, Any] = {}
    if schemas and not reads(text, "tools"):  # SmolLM3's and Phi-4-mini's templates take functions by other ways
        functions = [schema.get("function", schema) for schema in schemas]
        if reads(text, "xml_tools"):
            extra = {"xml_tools": functions}
        else:
            messages = _with_tools(messages, json.dumps(functions, ensure_ascii=False))
    render = chat.prepare(
        messages,
        tools=schemas or None,
        documents=documents,
        template=template,
        continue_final_message=continue_final_message,
        **_effort(text, reasoning_effort),
        **{**extra, **(template_options or {})},
    )
    reply = None
    if schemas or format.has_parts:
        reply = ReplyPlan(format, schemas, continued, pieces=stream_tool_calls)
    # The template writes special tokens itself.
    long = _is_long([originals, schemas, documents, template_options])
    return Prompt(None, None, add_special_tokens=False, render=render, reply=reply, messages=originals, long=long)


def _with_thoughts_alone(message: Any) -> Any:
    """Return a message without what was said beside thoughts and a call: templates of harmony take one of them."""
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


def _effort(text: str, effort: str | None) -> dict[str, Any]:
    """Return the variables for `reasoning_effort`. With `enable_thinking` alone, reasoning can only be on or off."""
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise InvalidRequest("reasoning_effort", effort, "is not a word", "Use 'none', 'low', 'medium' or 'high'")
    if reads(text, "reasoning_effort"):
        return {"reasoning_effort": effort}
    if reads(text, "enable_thinking"):
        return {"enable_thinking": effort != "none"}
    raise _unread("reasoning_effort", effort)


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


MAX_ROUNDS = 8


class ChatRequests:
    """Conversations with an open model."""

    _host: Host
    _front: Front

    @overload
    def chat(
        self,
        messages: Messages,
        sampling: Sampling | None = None,
        /,
        *,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        run_tools: Literal[False] = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        continue_final_message: bool = False,
        reasoning_effort: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        stream_tool_calls: bool = False,
        n: Literal[1] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Handle[Completion]: ...
    @overload
    def chat(
        self,
        messages: Messages,
        sampling: Sampling | None = None,
        /,
        *,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        run_tools: Literal[False] = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        continue_final_message: bool = False,
        reasoning_effort: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        stream_tool_calls: bool = False,
        n: int,
        **options: Unpack[SamplingOptions],
    ) -> Handle[list[Completion]]: ...
    @overload
    def chat(
        self,
        messages: Messages,
        sampling: Sampling | None = None,
        /,
        *,
        tools: Sequence[ToolLike],
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        run_tools: Literal[True],
        max_rounds: int = MAX_ROUNDS,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        reasoning_effort: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> ToolLoop: ...
    @takes_options(Sampling, returns="Handle[Completion] | ToolLoop", max_tokens=ANSWER_TOKENS)
    def chat(
        self,
        messages: Messages,
        sampling: Sampling | None = None,
        /,
        *,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        run_tools: bool = False,
        max_rounds: int = MAX_ROUNDS,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        continue_final_message: bool = False,
        reasoning_effort: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        stream_tool_calls: bool = False,
        **options: Any,
    ) -> Any:
        """Request the model's answer to a conversation, through its chat template. Await it or iterate over it.

        A message is a dict such as {"role": "user", "content": "Hello"}. The reply has `content`, the `reasoning`
        before it, and `tool_calls`; `reply.message` is the next message of the conversation.

        `tools` are the functions that the model may call: it is shown their name, docstring and type hints. They can be
        JSON schemas as dicts, too. `tool_choice` is "auto", "none", "required", or a tool's name: with these two the
        model has to call one, by a grammar (extra `structured`), and with `parallel_tool_calls=False` it may call only
        one. With `run_tools` the functions are run (async ones where they are awaited, others in a worker thread) and
        their results go back to the model, at most `max_rounds` times; the result is a `ToolRun` with the answer and
        all `messages`. In a stream, `delta.events` hold a call once it is complete; with `stream_tool_calls` its name
        and then its arguments, while the model writes them, and `ToolCallDropped` if it breaks off.

        `documents` are for templates that quote them, `template` replaces the model's own template,
        `template_options` are variables of the template such as {"enable_thinking": False}, and `reasoning_effort` is
        "none", "low", "medium" or "high" where the template knows it. With `continue_final_message` the answer goes on
        where the last message ends.
        """
        from rekindle._src.session.tool_functions import tools_of
        from rekindle._src.session.tool_loop import forcing, resolve_choice

        tools_ = tools_of(tools)
        choice = resolve_choice(tool_choice, tools_, parallel=parallel_tool_calls)
        if sampling is None and options.get("max_tokens") is None:
            options["max_tokens"] = ANSWER_TOKENS  # an answer should end by itself
        sampling_ = sampling_of(self._front, sampling, options)

        def ask(messages: Messages, *, free: bool = False) -> Handle[Any]:
            prompt = chat_prompt(
                self._front.chat,
                messages,
                model=self._front.model,
                tools=choice.shown,
                documents=documents,
                template=template,
                continue_final_message=continue_final_message,
                reasoning_effort=reasoning_effort,
                template_options=template_options,
                stream_tool_calls=stream_tool_calls,
            )
            self._host.check()
            effective = sampling_
            if choice.required and not free and prompt.reply is not None:
                effective = forcing(choice, sampling_, prompt.reply.format, self._front.tokenizer)
            return Handle(self._host, self, prompt, effective, structure=structure_in(self._front, effective))

        if not run_tools:
            return ask(messages)
        if sampling_.n != 1 or continue_final_message:
            field, value = ("n", sampling_.n) if sampling_.n != 1 else ("continue_final_message", True)
            raise InvalidRequest(field, value, "can't be combined with run_tools", "Run the tool calls yourself")
        from rekindle._src.session.tool_loop import ToolLoop

        self._host.check()
        return ToolLoop(ask, messages, tools_, max_rounds)

    @property
    def chat_template(self) -> str | None:
        """The model's chat template; None if it has none."""
        return None if self._front.chat is None else self._front.chat.text()

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[ToolLike] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        continue_final_message: bool = False,
        reasoning_effort: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that `chat` makes of these messages, special tokens included."""
        from rekindle._src.session.tool_functions import tools_of

        prompt = chat_prompt(
            self._front.chat,
            messages,
            model=self._front.model,
            tools=tools_of(tools),
            documents=documents,
            template=template,
            continue_final_message=continue_final_message,
            reasoning_effort=reasoning_effort,
            template_options=template_options,
        )
        assert prompt.render is not None, "a chat's prompt is rendered"
        return prompt.render()


class Conversations:
    """Chats that keep their messages."""

    def conversation(
        self,
        *,
        system: str | None = None,
        restore: str | os.PathLike[str] | None = None,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: ToolChoice | None = None,
        run_tools: bool = False,
        max_rounds: int | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        reasoning_effort: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Conversation:
        """Make a chat that keeps its messages: `chat = session.conversation()`, then `await chat.say("…")`.

        `system` opens it with a system message; `restore` continues one that `chat.save(path)` wrote. The other options
        are those of `chat`, for every turn. With `tools` and `run_tools` a turn is over when the model has answered;
        calls and results are among `chat.messages`.
        """
        from rekindle._src.session.conversation import open_conversation  # chats alone need it
        from rekindle._src.session.tool_functions import tools_of
        from rekindle._src.session.tool_loop import resolve_choice

        optional = {
            "tools": tools,
            "tool_choice": tool_choice,
            "run_tools": run_tools or None,
            "max_rounds": max_rounds,
            "documents": documents,
            "template": template,
            "reasoning_effort": reasoning_effort,
            "template_options": template_options,
        }
        resolve_choice(tool_choice, tools_of(tools))  # wrong tools are refused now, not at the first turn
        present = {name: value for name, value in optional.items() if value is not None}
        return open_conversation(self, system=system, restore=restore, sampling=options, **present)
