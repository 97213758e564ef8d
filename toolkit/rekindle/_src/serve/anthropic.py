"""`/v1/messages`: answer a conversation, as Anthropic's API does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle._src.core.records import Completion, FinishReason, TextDelta
from rekindle._src.core.reply import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallDropped,
    ToolCallStarted,
)
from rekindle._src.serve.anthropic_in import arguments, messages_of, tools_of
from rekindle._src.serve.chat import call_chat, calls_options
from rekindle._src.serve.chat_events import events_of
from rekindle._src.serve.errors import Refused, missing
from rekindle._src.serve.exchange import Exchange, dumps
from rekindle._src.serve.generation import encode_text, follow, model_of, submit, wait_all
from rekindle._src.serve.life import CHARACTERS_PER_TOKEN
from rekindle._src.serve.sampling import sampling_options
from rekindle._src.serve.structure import format_options

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ENDS = {FinishReason.LENGTH: "max_tokens", FinishReason.CONTEXT: "model_context_window_exceeded"}


class Anthropic:
    """Error objects of Anthropic's API."""

    def body(self, refused: Refused) -> dict[str, Any]:
        kind = _TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": refused.message}}

    def event(self, refused: Refused) -> bytes:
        return event("error", self.body(refused)).encode()


def event(name: str, data: Mapping[str, Any]) -> str:
    """Return a server-sent event with a name."""
    return f"event: {name}\ndata: {dumps({'type': name, **data})}\n\n"


async def messages(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Answer a request for a message."""
    served, session = model_of(exchange, fields)
    options: dict[str, Any] = sampling_options(fields, session)
    options["max_tokens"] = fields["max_tokens"]
    if fields.get("stop_sequences"):
        options["stop"] = fields["stop_sequences"]
    output = fields.get("output_config") or {}
    format = output.get("format") or fields.get("output_format") or {"type": "text"}
    structure, names = format_options(format, "output_config.format" if "format" in output else "output_format")
    exchange.names = {**exchange.names, **names, "prompt": "messages"}
    template = template_options(fields)
    parallel = not (fields.get("tool_choice") or {}).get("disable_parallel_tool_use", False)
    options |= structure | calls_options(fields, parallel=parallel)
    tokens = exchange.size // CHARACTERS_PER_TOKEN + 1
    with exchange.takes_on(tokens) as active:
        handle = await exchange.run(lambda: call_chat(session.chat, messages_of(fields), {**options, **template}))
        submit(exchange, active, [handle])
        if not fields.get("stream"):
            ((completion,),) = await wait_all(exchange, active, [handle])
            await exchange.reply(_message(exchange, served.name, completion, parallel=parallel))
            return
        stream = _Stream(exchange, served.name, parallel=parallel)

        async def write(_: int, delta: TextDelta) -> None:
            stream.begin(len(handle.prompt_token_ids))
            stream.take(delta)
            await stream.flush()

        ((completion,),) = await follow(exchange, active, [handle], write)
        stream.end(completion)
        await stream.flush()


async def count_tokens(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Answer with the number of tokens of a conversation."""
    _, session = model_of(exchange, fields)
    template = template_options(fields)
    template.pop("tool_choice", None)

    def count() -> int:
        text = call_chat(session.render, messages_of(fields), template)
        return len(encode_text(session, text, add_special_tokens=False, param="messages"))

    await exchange.reply({"input_tokens": await exchange.run_in_turn(count)})


def template_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `session.chat` that follow from the request."""
    options: dict[str, Any] = {}
    if tools := tools_of(fields):
        options["tools"] = tools
    choice = fields.get("tool_choice") or {}
    match choice.get("type"):
        case "any":
            options["tool_choice"] = "required"
        case "tool":
            if not choice.get("name"):
                raise missing("tool_choice.name", "Name the tool")
            options["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
        case "auto" | "none" as word:
            options["tool_choice"] = word
    thinking = (fields.get("thinking") or {}).get("type")
    if thinking in ("enabled", "disabled"):
        options["template_options"] = {"enable_thinking": thinking == "enabled"}
    if (effort := (fields.get("output_config") or {}).get("effort")) is not None:
        options["reasoning_effort"] = effort
    if fields["messages"][-1]["role"] == "assistant":
        options["continue_final_message"] = True
    return options


def _stop_fields(completion: Completion) -> dict[str, Any]:
    if completion.tool_calls and completion.finish_reason not in _ENDS:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": _ENDS.get(completion.finish_reason, "end_turn"), "stop_sequence": None}


def _usage(completion: Completion) -> dict[str, Any]:
    cached = completion.usage.cached_tokens
    return {
        "input_tokens": completion.usage.prompt_tokens - cached,  # this API counts cached tokens separately
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion.usage.completion_tokens,
    }


def _envelope(exchange: Exchange, model: str) -> dict[str, Any]:
    return {"id": f"msg_{exchange.request_id}", "type": "message", "role": "assistant", "model": model}


def _message(exchange: Exchange, model: str, completion: Completion, *, parallel: bool) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if completion.reasoning:
        content.append({"type": "thinking", "thinking": completion.reasoning, "signature": ""})
    if completion.content or not completion.tool_calls:
        content.append({"type": "text", "text": completion.content})
    for call in completion.tool_calls if parallel else completion.tool_calls[:1]:
        input = arguments(call.arguments_text)
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": input})
    return {**_envelope(exchange, model), "content": content, **_stop_fields(completion), "usage": _usage(completion)}


class _Stream:
    """Writes events; blocks follow one another, so each is closed before the next begins."""

    def __init__(self, exchange: Exchange, model: str, *, parallel: bool) -> None:
        self._exchange, self._model, self._parallel = exchange, model, parallel
        self._out: list[str] = []
        self._begun = False
        self._index = -1
        self._open = ""  # the kind of the open block

    def begin(self, prompt_tokens: int) -> None:
        """Write the start of the message, once."""
        if self._begun:
            return
        self._begun = True
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        fields: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        self._out.append(event("message_start", {"message": {**_envelope(self._exchange, self._model), **fields}}))

    def take(self, delta: TextDelta) -> None:
        """Write the events of a delta."""
        for part in events_of(delta, parallel=self._parallel):
            match part:
                case ContentDelta(text) | ToolCallDropped(_, text):
                    self._block("text", {"type": "text", "text": ""})
                    self._delta({"type": "text_delta", "text": text})
                case ReasoningDelta(text):
                    self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                    self._delta({"type": "thinking_delta", "thinking": text})
                case ToolCallStarted(_, call_id, name):
                    self._close()
                    self._block("tool_use", {"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case ToolCallArguments(_, text):
                    self._delta({"type": "input_json_delta", "partial_json": text})

    def _block(self, kind: str, start: dict[str, Any]) -> None:
        if self._open == kind:
            return
        self._close()
        self._index, self._open = self._index + 1, kind
        self._out.append(event("content_block_start", {"index": self._index, "content_block": start}))

    def _delta(self, delta: dict[str, Any]) -> None:
        self._out.append(event("content_block_delta", {"index": self._index, "delta": delta}))

    def _close(self) -> None:
        if self._open:
            self._out.append(event("content_block_stop", {"index": self._index}))
            self._open = ""

    def end(self, completion: Completion) -> None:
        """Write the end of the message."""
        if self._index < 0:
            self._block("text", {"type": "text", "text": ""})
        self._close()
        self._out.append(event("message_delta", {"delta": _stop_fields(completion), "usage": _usage(completion)}))
        self._out.append(event("message_stop", {}))

    async def flush(self) -> None:
        """Send the written events."""
        if self._out:
            data, self._out = "".join(self._out), []
            await self._exchange.emit(data.encode())
