"""`/v1/chat/completions`: answer a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from rekindle._src.core.records import Completion, FinishReason, TextDelta
from rekindle._src.core.reply import (
    ContentDelta,
    ReasoningDelta,
    ReplyEvent,
    ToolCall,
    ToolCallArguments,
    ToolCallDropped,
    ToolCallStarted,
)
from rekindle._src.serve import generation
from rekindle._src.serve.bodies import Entries, text_of
from rekindle._src.serve.content import ReadPart, RequestContent, content_of, content_text, has_other, is_other
from rekindle._src.serve.errors import wrong
from rekindle._src.serve.exchange import Exchange, dumps
from rekindle._src.serve.life import Active
from rekindle._src.serve.metrics import finish_of
from rekindle._src.serve.models import HandleLike, ServedSession
from rekindle._src.serve.openai_fields import BUDGETS
from rekindle.errors import InvalidRequest, abbreviated

T = TypeVar("T")
_OWN_FIELDS = frozenset(
    ("messages", "tools", "template", "documents", "add_generation_prompt", "continue_final_message")
)
_BUDGET_NAMES = {"reasoning_budget": "reasoning_budget_tokens"}
NAMES = _BUDGET_NAMES | {"prompt": "messages", "template": "chat_template", "template_options": "chat_template_kwargs"}
_OF_CHAT = ("documents", "tools", "tool_choice")  # options of `session.chat` by the same names
_OF_REASONING = ("reasoning", "reasoning_effort")  # left out where a model does not reason, or has no degrees of it
_OF_BUDGET = ("reasoning_budget", "reasoning_budget_message")  # change no prompt


async def chat(exchange: Exchange, fields: dict[str, Any]) -> None:
    served, session = await generation.model_of(exchange, fields)
    exchange.names = {**exchange.names, **NAMES, "max_tokens": _limit_field(fields), "logprobs": "top_logprobs"}
    form = generation.form_of(exchange, fields)
    options = {**chat_options(fields, session), **template_options(exchange, fields), **form}
    streaming = generation.stream_options(fields)
    options |= calls_options(fields, parallel=fields.get("parallel_tool_calls", True))
    options |= generation.overflow_option(fields)
    content = RequestContent(exchange, session)
    echoed = _echoed(fields)
    messages = await content.messages(lambda read: plain_messages(fields.pop("messages"), read))
    with exchange.takes_on(content.tokens) as active:
        await content.fetch()
        handle = await exchange.run(partial(call_chat, session.chat, messages, options))
        del messages
        generation.submit(exchange, active, [handle])
        writer = _ChatWriter(exchange, fields, served.name, session, handle, echoed)
        if fields.get("stream"):
            await writer.stream(active, streaming)
            return
        completions = await generation.wait_all(exchange, active, [handle])
        await exchange.reply(await writer.whole(completions))


def call_chat(method: Callable[..., T], messages: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> T:
    """Call `session.chat` or `session.render`; leave out a switch or an effort that the model's template has not.

    A budget that comes with a switch goes with it.
    """
    try:
        return method(messages, **options)
    except InvalidRequest as error:
        if error.field not in _OF_REASONING or error.field not in options:
            raise
        refused = error.field
    left_out = {refused, *(_OF_BUDGET if refused == "reasoning" else ())}
    return call_chat(method, messages, {name: value for name, value in options.items() if name not in left_out})


def encode_chat(
    session: ServedSession, messages: Sequence[Mapping[str, Any]], options: dict[str, Any], *, special: bool = False
) -> list[int]:
    """Return the token ids of a conversation, which may exceed the context. Of pictures, headers alone are read.

    Raise `ApiError` if its text is too long to encode.
    """
    options = {name: value for name, value in options.items() if name not in _OF_BUDGET}
    text = call_chat(session.render, messages, options)
    if not any(isinstance(message.get("content"), list) and has_other(message["content"]) for message in messages):
        return generation.encode_text(session, text, add_special_tokens=special, param="messages")
    if special:
        raise wrong("add_special_tokens", True, "is not for messages with pictures", "Leave it out")
    generation.check_length(session, text, "messages")
    return call_chat(session.chat_tokens, messages, options)


def calls_options(fields: Mapping[str, Any], *, parallel: bool) -> dict[str, bool]:
    """Return the options of `session.chat` for streamed tool calls and for at most one call."""
    options = {"stream_tool_calls": True} if fields.get("stream") and fields.get("tools") else {}
    return options if parallel else {**options, "parallel_tool_calls": False}


def _limit_field(fields: Mapping[str, Any]) -> str:
    return "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"


def chat_options(fields: Mapping[str, Any], session: ServedSession) -> dict[str, Any]:
    options = generation.sampling_options(fields, session)
    options["max_tokens"] = fields.get(_limit_field(fields), generation.rest_of_context(session))
    if fields.get("top_logprobs") and not fields.get("logprobs"):
        raise wrong("top_logprobs", fields["top_logprobs"], "is given without logprobs", "Add logprobs: true")
    if fields.get("logprobs"):
        options["logprobs"] = fields.get("top_logprobs", 0)
    return options


def template_options(exchange: Exchange, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `session.chat` that the template reads."""
    options: dict[str, Any] = {}
    variables: dict[str, Any] = dict(fields.get("chat_template_kwargs") or {})
    for name in _OWN_FIELDS & variables.keys():
        raise wrong(f"chat_template_kwargs.{name}", variables[name], "is a field of its own", f"Pass {name} next to it")
    options |= {name: fields[name] for name in _OF_CHAT if name in fields}
    options |= tool_options(options) | reasoning_options(fields)
    if fields.get("continue_final_message"):
        if fields.get("add_generation_prompt"):
            fix = "Set one of the two"
            raise wrong("add_generation_prompt", True, "contradicts continue_final_message", fix)
        options["continue_final_message"] = True
    elif "add_generation_prompt" in fields:
        variables["add_generation_prompt"] = fields["add_generation_prompt"]
    if "chat_template" in fields:
        if not exchange.service.trust_templates:
            fix = "Remove it, or start the server with --trust-request-chat-template"
            raise wrong("chat_template", fields["chat_template"], "is not accepted by this server", fix)
        options["template"] = fields["chat_template"]
    if fields.get("add_special_tokens"):
        raise wrong("add_special_tokens", True, "is not possible: the template writes them", "Remove it")
    if variables:
        options["template_options"] = variables
    return options


def reasoning_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `session.chat` for how much a model reasons. One budget may have several names."""
    options: dict[str, Any] = {}
    more = fields.get("reasoning") or {}
    for name in more.keys() - {"effort", "max_tokens", "summary", "generate_summary"}:
        raise wrong(f"reasoning.{name}", more[name], "is not known", "Use effort or max_tokens")
    effort = fields.get("reasoning_effort", more.get("effort"))
    if effort == "none":
        options["reasoning"] = False
    elif effort is not None:
        options["reasoning_effort"] = effort
    given = {name: fields[name] for name in BUDGETS if name in fields}
    if more.get("max_tokens") is not None:
        given["reasoning.max_tokens"] = more["max_tokens"]
    budgets = {name: value for name, value in given.items() if value >= 0}
    if len({*budgets.values()}) > 1:
        first, second, *_ = budgets
        raise wrong(second, budgets[second], f"contradicts {first}={budgets[first]}", "Set one of them")
    for name, value in budgets.items():
        if options.get("reasoning") is False and value:
            raise wrong(name, value, 'contradicts the effort "none"', "Set one of them")
        options["reasoning_budget"] = value
    if "reasoning_budget_message" in fields and budgets:
        options["reasoning_budget_message"] = fields["reasoning_budget_message"]
    return options


def tool_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tools` without null members. `allowed_tools` selects some of them, and its mode is the choice."""
    plain: dict[str, Any] = {}
    if "tools" in options:
        plain["tools"] = [
            {**tool, "function": {name: value for name, value in tool["function"].items() if value is not None}}
            for tool in options["tools"]
        ]
    choice = options.get("tool_choice")
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return plain
    fields = choice.get("allowed_tools", choice)  # the API of responses has its members in the choice itself
    path = "tool_choice.allowed_tools" if "allowed_tools" in choice else "tool_choice"
    mode = fields.get("mode") if isinstance(fields, Mapping) else None
    if mode not in ("auto", "required"):
        raise wrong(f"{path}.mode", mode, "is not known", "Use auto or required")
    allowed = fields.get("tools")
    if not isinstance(allowed, list) or not allowed or not all(isinstance(tool, Mapping) for tool in allowed):
        raise wrong(f"{path}.tools", allowed, "is not a list of tools", "Name one at least")
    by_name = {tool["function"]["name"]: tool for tool in plain.get("tools", ())}
    selection: dict[str, Any] = {}  # each once, however often it is named
    for index, tool in enumerate(allowed):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in by_name:
            raise wrong(
                f"{path}.tools[{index}]", name, "names none of the tools", f"Use one of {abbreviated([*by_name])}"
            )
        selection[name] = by_name[name]
    return {"tools": [*selection.values()], "tool_choice": mode}


def plain_messages(messages: Sequence[Mapping[str, Any]], read: ReadPart) -> list[dict[str, Any]]:
    """Return copies of the messages with one text each, or with parts where some are pictures. Refuse other parts.

    The assistant's messages have no pictures.
    """
    copies = []
    for index, message in enumerate(messages):
        plain = {name: value for name, value in message.items() if value is not None}
        if isinstance(plain.get("content"), list):
            parts, path = plain["content"], f"messages[{index}].content"
            plain["content"] = (
                content_text(parts, path) if plain["role"] == "assistant" else content_of(parts, path, read)
            )
        copies.append(plain)
    return copies


class _ChatWriter(generation.Writer):
    def __init__(
        self, exchange: Exchange, fields: Mapping[str, Any], model: str, session: ServedSession, handle: HandleLike,
        echoed: str,
    ) -> None:  # fmt: skip
        super().__init__(exchange, fields, model, session, "chatcmpl", "chat.completion")
        self._handle, self._before = handle, echoed
        self._parallel = fields.get("parallel_tool_calls", True)
        self._reasons = fields.get("include_reasoning", True)

    async def whole(self, completions: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        (choices,) = completions

        def choice_of(completion: Completion) -> dict[str, Any]:
            choice: dict[str, Any] = {
                "index": completion.index,
                "message": self._message(completion),
                "logprobs": self._shapes.chat(completion.logprobs or ()) if self._fields.get("logprobs") else None,
                "finish_reason": _finish(completion.finish_reason, called=bool(completion.tool_calls)),
                "stop_reason": completion.stop_reason,
            }
            if self._ids:
                choice |= {"token_ids": completion.token_ids, "weights_versions": completion.weights_versions}
            return choice

        answer = await self._answer(completions, Entries(choices, choice_of))
        answer |= generation.left_out_member(choices[0].left_out)
        if "prompt_logprobs" in self._fields:
            answer["prompt_logprobs"] = self._shapes.prompt(choices[0].prompt_logprobs or ())
        if self._ids:
            answer["prompt_token_ids"] = choices[0].prompt_token_ids
        return answer

    def _message(self, completion: Completion) -> dict[str, Any]:
        """Return the assistant's message. Clients read the reasoning under either of two names."""
        message: dict[str, Any] = {"role": "assistant", "content": self._before + completion.content, "refusal": None}
        if completion.reasoning and self._reasons:
            message |= {"reasoning": completion.reasoning, "reasoning_content": completion.reasoning}
        if completion.tool_calls:
            calls = completion.tool_calls if self._parallel else completion.tool_calls[:1]
            message["content"] = message["content"] or None
            message["tool_calls"] = [_call(call) for call in calls]
        return message

    async def stream(self, active: Active, options: Mapping[str, Any]) -> None:
        chunks = generation.Chunks({**self._common, "object": "chat.completion.chunk"}, options=options)
        begun: set[int] = set()
        calls: set[tuple[int, int]] = set()  # pairs of choice and call
        prompt = generated = 0  # tokens

        async def write(number: int, delta: TextDelta) -> None:
            nonlocal prompt, generated
            generated += len(delta.token_ids)
            if chunks.continuous and not begun:
                prompt = len(self._handle.prompt_token_ids)
            usage_so_far = generation.usage_object(prompt, generated) if chunks.continuous else None
            parts: list[str] = []
            if delta.index not in begun:
                content = f'"role":"assistant","content":{dumps(self._before)}'
                extra = await self._extra(delta) if not begun else ""
                parts.append(chunks.chunk(_choice(delta.index, content), usage_so_far, extra))
                begun.add(delta.index)
            logprobs = "null"
            if self._fields.get("logprobs"):  # a delta holds many tokens if the client is slow
                logprobs = await text_of(self._shapes.chat(delta.logprobs))
            ids = generation.token_members(delta) if self._ids else ""
            contents = self._contents(delta)
            if not contents and (logprobs != "null" or ids) and delta.token_ids:
                contents = ['"content":""']
            for content in contents:
                parts.append(chunks.chunk(_choice(delta.index, content, logprobs, more=ids), usage_so_far))
                logprobs, ids = "null", ""  # sent once, with the first chunk of these tokens
            for event in delta.events or ():
                if isinstance(event, ToolCallStarted):
                    calls.add((delta.index, event.index))
                elif isinstance(event, ToolCallDropped):
                    calls.discard((delta.index, event.index))
            if delta.finish_reason is not None:
                finish_reason = _finish(delta.finish_reason, called=any(index == delta.index for index, _ in calls))
                reason = f',"stop_reason":{dumps(delta.stop_reason)}'
                parts.append(chunks.chunk(_choice(delta.index, "", "null", finish_reason, reason), usage_so_far))
            if parts:
                await self._exchange.emit("".join(parts).encode())

        await self._end(chunks, await generation.follow(self._exchange, active, [self._handle], write))

    def _contents(self, delta: TextDelta) -> list[str]:
        """Return the `delta` members of the chunks for one delta: one text for each chunk."""
        contents = []
        for event in events_of(delta):
            match event:
                case ContentDelta(text) | ToolCallDropped(_, text):
                    contents.append(f'"content":{dumps(text)}')
                case ReasoningDelta(text) if self._reasons:
                    contents.append(f'"reasoning":{dumps(text)},"reasoning_content":{dumps(text)}')
                case ToolCallStarted(index, call_id, name) if self._parallel or not index:
                    function = {"name": name, "arguments": ""}
                    call = {"index": index, "id": call_id, "type": "function", "function": function}
                    contents.append(f'"tool_calls":{dumps([call])}')
                case ToolCallArguments(index, text) if self._parallel or not index:
                    contents.append(f'"tool_calls":{dumps([{"index": index, "function": {"arguments": text}}])}')
        return contents

    async def _extra(self, delta: TextDelta) -> str:
        """Return the members of the first chunk other than its choices, as JSON text."""
        extra = ""
        if "prompt_logprobs" in self._fields:
            extra += f',"prompt_logprobs":{await text_of(self._shapes.prompt(delta.prompt_logprobs))}'
        if self._ids:
            extra += f',"prompt_token_ids":{dumps(self._handle.prompt_token_ids)}'
        for name, value in generation.left_out_member(self._handle.left_out).items():
            extra += f',"{name}":{dumps(value)}'
        return extra


def events_of(delta: TextDelta, *, parallel: bool = True) -> Sequence[ReplyEvent]:
    """Return the events of a delta. Without `parallel`, leave out calls after the first."""
    if delta.events is None:
        return (ContentDelta(delta.text),) if delta.text else ()
    if parallel:
        return delta.events
    calls = ToolCallStarted | ToolCallArguments | ToolCallDropped
    return [event for event in delta.events if not (isinstance(event, calls) and event.index)]


def _choice(index: int, delta: str, logprobs: str = "null", reason: str | None = None, more: str = "") -> str:
    """Return a choice of a chunk as JSON. It is built from text because it runs for each token."""
    finish_reason = "null" if reason is None else f'"{reason}"'
    return f'{{"index":{index},"delta":{{{delta}}},"logprobs":{logprobs},"finish_reason":{finish_reason}{more}}}'


def _finish(reason: FinishReason | None, *, called: bool) -> str | None:
    finish_reason = finish_of(reason)
    return "tool_calls" if called and finish_reason == "stop" else finish_reason


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_text}}


def _echoed(fields: Mapping[str, Any]) -> str:
    """Return the text of the last message if the answer continues it and echoes it, else an empty string."""
    if not fields.get("echo") or not fields.get("continue_final_message"):
        return ""
    content = fields["messages"][-1].get("content") or ""
    if isinstance(content, str):
        return content
    return content_text([part for part in content if not is_other(part)], "content")
