"""`/v1/messages` and `/v1/messages/count_tokens`: their fields, Anthropic's messages as OpenAI's, and the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rekindle._src.core.records import Completion, FinishReason, TextDelta
from rekindle._src.core.reply import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallDropped, ToolCallStarted
from rekindle._src.serve import generation
from rekindle._src.serve.chat import call_chat, calls_options, encode_chat, events_of
from rekindle._src.serve.content import ReadPart, RequestContent, has_other, is_other
from rekindle._src.serve.errors import ApiError, missing, wrong
from rekindle._src.serve.exchange import Exchange, dumps
from rekindle._src.serve.fields import (
    Boolean,
    Either,
    Endpoint,
    Field,
    Items,
    OneOf,
    Shape,
    String,
    ignored,
    refused,
    whole,
)
from rekindle._src.serve.openai_fields import MOST, MOST_MESSAGES, OBJECT, SAMPLING_BY_NAME

BLOCKS = Items(Shape((("type", String()),), ("type",)))
CONTENT = Either("a string or a list of blocks", ((str, String()), (list, BLOCKS)))
MESSAGE = Shape((("role", OneOf(("user", "assistant", "system"))), ("content", CONTENT)), ("role", "content"))
TOOL = Shape(
    (("name", String(maximum=256, minimum=1)), ("description", String()), ("input_schema", OBJECT), ("type", String())),
    ("name",),
)
TOOL_CHOICE = Shape(
    (("type", OneOf(("auto", "any", "tool", "none"))), ("name", String()), ("disable_parallel_tool_use", Boolean())),
    ("type",),
)
THINKING = Shape(
    (("type", OneOf(("enabled", "disabled", "adaptive", "between_tools"))), ("budget_tokens", whole(0, MOST))),
    ("type",),
)
OUTPUT = Shape((("format", OBJECT), ("effort", String(maximum=64))))
_SHARED_FIELDS = (
    Field("model", String(maximum=512), "The name of a served model; may be left out."),
    Field("messages", Items(MESSAGE, minimum=1, maximum=MOST_MESSAGES), "The conversation so far.", required=True),
    Field("system", CONTENT, "What the model is told before the conversation."),
    Field("tools", Items(TOOL, maximum=512), "Functions that the model may call."),
    Field("tool_choice", TOOL_CHOICE, "auto, none, any, or one tool."),
    Field("thinking", THINKING, "Whether the model thinks before it answers, and for how many tokens (budget_tokens)."),
    Field("output_config", OUTPUT, "format: a json_schema that the text has to follow; effort, where it is known."),
    Field("output_format", OBJECT, "The older name of output_config.format."),
    ignored("cache_control", "Prefixes are cached by their content."),
    ignored("speed", "There is one."),
    ignored("diagnostics", "There are none."),
    ignored("user_profile_id", "Not used."),
    ignored("workspace_id", "Not used."),
    refused("mcp_servers", "the server connects to no others", []),
    refused("container", "there are no containers"),
    refused("context_management", "shorten the conversation before sending it"),
)
MESSAGES = Endpoint(
    "/v1/messages",
    "Answer a conversation, as Anthropic's API does",
    (
        *_SHARED_FIELDS,
        Field("max_tokens", whole(1, MOST), "New tokens at most.", required=True),
        Field("stop_sequences", Items(String(minimum=1), maximum=64), "Strings that end the text.", option="stop"),
        Field("stream", Boolean(), "Send the answer as server-sent events, while it is made."),
        *(SAMPLING_BY_NAME[name] for name in ("temperature", "top_k", "top_p")),
        ignored("metadata", "Not stored."),
        ignored("service_tier", "There is one."),
        ignored("inference_geo", "It runs here."),
    ),
)
COUNT_TOKENS = Endpoint("/v1/messages/count_tokens", "How many tokens a conversation has", _SHARED_FIELDS)
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

    def body(self, refused: ApiError) -> dict[str, Any]:
        kind = _TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": refused.message}}

    def event(self, refused: ApiError) -> bytes:
        return event("error", self.body(refused)).encode()


def event(name: str, data: Mapping[str, Any]) -> str:
    return f"event: {name}\ndata: {dumps({'type': name, **data})}\n\n"


async def messages(exchange: Exchange, fields: dict[str, Any]) -> None:
    served, session = await generation.model_of(exchange, fields)
    options: dict[str, Any] = generation.sampling_options(fields, session)
    options["max_tokens"] = fields["max_tokens"]
    if fields.get("stop_sequences"):
        options["stop"] = fields["stop_sequences"]
    output = fields.get("output_config") or {}
    format = output.get("format") or fields.get("output_format") or {"type": "text"}
    path = "output_config.format" if "format" in output else "output_format"
    form = generation.form_at(exchange, format, path)
    exchange.names = {**exchange.names, "prompt": "messages"}
    template = template_options(fields)
    parallel = not (fields.get("tool_choice") or {}).get("disable_parallel_tool_use", False)
    options |= form | calls_options(fields, parallel=parallel)
    content = RequestContent(exchange, session)
    messages = await content.messages(lambda read: messages_of(fields, read))
    with exchange.takes_on(content.tokens) as active:
        await content.fetch()
        handle = await exchange.run(partial(call_chat, session.chat, messages, {**options, **template}))
        del messages
        generation.submit(exchange, active, [handle])
        if not fields.get("stream"):
            ((completion,),) = await generation.wait_all(exchange, active, [handle])
            await exchange.reply(_message(exchange, served.name, completion, parallel=parallel))
            return
        stream = _EventWriter(exchange, served.name, parallel=parallel)

        async def write(_: int, delta: TextDelta) -> None:
            if not stream.begun:
                stream.begin(len(handle.prompt_token_ids))
            stream.take(delta)
            await stream.flush()

        ((completion,),) = await generation.follow(exchange, active, [handle], write)
        stream.end(completion)
        await stream.flush()


async def count_tokens(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Answer with the number of tokens of a conversation."""
    _, session = await generation.model_of(exchange, fields)
    template = template_options(fields)
    template.pop("tool_choice", None)
    content = RequestContent(exchange, session)
    messages = await content.messages(lambda read: messages_of(fields, read))
    await content.fetch()
    count = await exchange.run_in_turn(lambda: len(encode_chat(session, messages, template)))
    await exchange.reply({"input_tokens": count})


def messages_of(fields: dict[str, Any], read: ReadPart) -> list[dict[str, Any]]:
    """Take the messages out of the fields. Return them as a conversation.

    Refuse blocks other than text, pictures, thinking and tools by name.
    """
    messages: list[dict[str, Any]] = []
    if fields.get("system"):
        messages.append({"role": "system", "content": _text(fields.pop("system"), "system")})
    for index, message in enumerate(fields.pop("messages")):
        path = f"messages[{index}].content"
        if isinstance(message["content"], str):
            messages.append({"role": message["role"], "content": message["content"]})
        elif message["role"] == "assistant":
            messages.append(_assistant(message["content"], path))
        else:
            messages += _user(message["role"], message["content"], path, read)
    return messages


def tools_of(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
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
                    problem = "is missing or of a wrong type"
                    raise wrong(f"{block_path}.{name}", block.get(name), problem, "Pass the call")
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


def _user(role: str, blocks: Sequence[Mapping[str, Any]], path: str, read: ReadPart) -> list[dict[str, Any]]:
    """Return a message for each tool result, and then one for the user's text."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        block_path = f"{path}[{index}]"
        if is_other(block):
            parts.append(read(block, block_path))
            continue
        if block["type"] != "tool_result":
            parts.append({"type": "text", "text": _member(block, "text", block_path)})
            continue
        if not isinstance(block.get("tool_use_id"), str):
            raise wrong(f"{block_path}.tool_use_id", block.get("tool_use_id"), "is not a string", "Pass the call's id")
        content = _result(block.get("content"), f"{block_path}.content")
        content = f"Error: {content}" if block.get("is_error") else content
        results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
    whole = parts if has_other(parts) else "\n".join(part["text"] for part in parts)
    return [*results, *([{"role": role, "content": whole}] if parts or not results else [])]


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
    thinking = fields.get("thinking") or {}
    if thinking.get("type") in ("enabled", "disabled"):
        options["template_options"] = {"enable_thinking": thinking["type"] == "enabled"}
        options["reasoning"] = thinking["type"] == "enabled"
    if thinking.get("type") == "enabled" and thinking.get("budget_tokens") is not None:
        options["reasoning_budget"] = thinking["budget_tokens"]
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


class _EventWriter:
    """Writes events; blocks follow one another, so each is closed before the next begins."""

    def __init__(self, exchange: Exchange, model: str, *, parallel: bool) -> None:
        self._exchange, self._model, self._parallel = exchange, model, parallel
        self._out: list[str] = []
        self.begun = False
        self._index = -1
        self._open = ""  # the kind of the open block

    def begin(self, prompt_tokens: int) -> None:
        self.begun = True
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        fields: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        self._out.append(event("message_start", {"message": {**_envelope(self._exchange, self._model), **fields}}))

    def take(self, delta: TextDelta) -> None:
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
        if self._index < 0:
            self._block("text", {"type": "text", "text": ""})
        self._close()
        self._out.append(event("message_delta", {"delta": _stop_fields(completion), "usage": _usage(completion)}))
        self._out.append(event("message_stop", {}))

    async def flush(self) -> None:
        if self._out:
            data, self._out = "".join(self._out), []
            await self._exchange.emit(data.encode())
