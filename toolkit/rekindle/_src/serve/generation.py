"""The steps shared by all endpoints that generate text.

The fields of a request become options of the session, structure (`response_format` and the like) included; the request
is submitted and followed; its tokens are counted and its end is reported.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio

from rekindle._src.core.left_out import LeftOut
from rekindle._src.core.records import Completion, TextDelta
from rekindle._src.core.sampling import MAX_STRUCTURE
from rekindle._src.serve.bodies import Entries
from rekindle._src.serve.errors import missing, wrong
from rekindle._src.serve.exchange import FINGERPRINT, Exchange, dumps
from rekindle._src.serve.ledger import Results
from rekindle._src.serve.life import Active
from rekindle._src.serve.logprobs import LogprobShapes
from rekindle._src.serve.models import HandleLike, ServedModel, ServedSession
from rekindle._src.serve.openai_fields import SAMPLING
from rekindle._src.text.generation_config import NAMES

_KINDS = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "grammar", "json_object": "json"}
_WITHOUT_MEANING = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
MOST_CHARACTERS = 1 << 20  # of a text to encode at most, unless the context has room for more


async def model_of(exchange: Exchange, fields: Mapping[str, Any]) -> tuple[ServedModel, ServedSession]:
    """Return the model that a request names, and its session. Rename the exchange if the body has a request_id.

    A model that is loaded on demand is waited for.
    """
    if "request_id" in fields:
        exchange.rename(fields["request_id"])
    served = exchange.service.models.get(fields.get("model"))
    exchange.model = served.figures
    return served, await served.take(exchange)


def sampling_options(fields: Mapping[str, Any], session: ServedSession) -> dict[str, Any]:
    """Return the options of the fields in `SAMPLING`, which every API has under the same names."""
    options = {field.option or field.name: fields[field.name] for field in SAMPLING if field.name in fields}
    if "temperature" not in options and session.sampling.greedy and session.config.generation_config != "greedy":
        options["temperature"] = 1.0  # OpenAI's and Anthropic's default, if the checkpoint has none
    if session.chat_sampling != session.sampling:  # a chat's own defaults are for callers without an API's
        for name in NAMES:
            options.setdefault(name, getattr(session.sampling, name))
    if "top_k" in options:
        options["top_k"] = max(0, options["top_k"])
    if "seed" in options:
        options["seed"] %= 2**63
    if options.get("priority"):
        policy = session.config.policy
        if policy != "priority":
            fix = 'Remove it, or start the server with the policy "priority"'
            raise wrong("priority", fields["priority"], f"means nothing with the server's policy {policy!r}", fix)
        options["priority"] *= -1  # vLLM serves the smallest first
    if options.get("logit_bias"):
        options["logit_bias"] = _biases(options["logit_bias"])
    if "prompt_logprobs" in fields:
        options["prompt_logprobs"] = fields["prompt_logprobs"]
    return options


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    by_token = {}
    for key, value in biases.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise wrong("logit_bias", key, "is not a token id", 'Use whole numbers as keys, such as {"464": -100}')
        by_token[int(key)] = value
    return by_token


def overflow_option(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the option of `session.chat` for a conversation that is longer than the context."""
    return {"overflow": "drop"} if fields.get("truncation") == "auto" else {}


def left_out_member(left_out: LeftOut | None) -> dict[str, Any]:
    """Return the member of an answer that counts the turns left out of its prompt; empty if it has them all."""
    if left_out is None:
        return {}
    return {"left_out": {"turns": left_out.turns, "messages": left_out.messages, "first": left_out.first}}


def rest_of_context(session: ServedSession) -> int:
    """Return the context's length as the token limit: the session ends the request where the context is full."""
    return session.config.max_model_len


def form_of(exchange: Exchange, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the form of an answer, of `response_format` and `structured_outputs`.

    The exchange learns their names in the request.
    """
    options, names = _structure_options(fields)
    exchange.names = {**exchange.names, **names}
    return options


def form_at(exchange: Exchange, format: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the options for the form of an answer, of the `format` object at a path of the request.

    The exchange learns their names in the request.
    """
    options, names = _format_options(format, path)
    exchange.names = {**exchange.names, **names}
    return options


def _structure_options(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    format = fields.get("response_format")
    members = {name: value for name, value in (fields.get("structured_outputs") or {}).items() if value is not None}
    if format is not None and format.get("type") != "text":
        if members:
            raise wrong("structured_outputs", members, "is given together with response_format", "Send one of the two")
        return _format_options(format, "response_format")
    options: dict[str, Any] = {}
    for name, value in members.items():
        path = f"structured_outputs.{name}"
        if name in _WITHOUT_MEANING or (name == "json_object" and value is False):
            continue
        if name not in _KINDS:
            raise wrong(path, value, "is not supported", f"Use one of {', '.join(_KINDS)}", code="unsupported")
        options[_KINDS[name]] = _schema(value, path) if name == "json" else value
    if len(options) > 1:
        raise wrong("structured_outputs", list(members), "asks for several structures", "Send one of them")
    return options, {_KINDS[name]: f"structured_outputs.{name}" for name in members if name in _KINDS}


def _format_options(format: Mapping[str, Any], path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options of a format object. Its schema is in it, or in its `json_schema`."""
    match format.get("type"):
        case "text":
            return {}, {}
        case "json_object":
            return {"json": True}, {"json": path}
        case "json_schema":
            holder = format.get("json_schema") if "json_schema" in format else format
            if not isinstance(holder, Mapping) or holder.get("schema") is None:
                raise missing(f"{path}.json_schema.schema", "Add the schema")
            # Without strict, a schema may have rules that a grammar can't check.
            options: dict[str, Any] = {"schema": _schema(holder["schema"], f"{path}.json_schema.schema")}
            if holder.get("strict") is not True:
                options["lenient"] = True
            return options, {"schema": f"{path}.json_schema.schema"}
        case kind:
            fix = "Use text, json_object or json_schema"
            raise wrong(f"{path}.type", kind, "is not supported", fix, code="unsupported")


def _schema(value: Any, path: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        if len(value) > MAX_STRUCTURE:
            raise wrong(
                path, value, f"has {len(value):,} characters, more than {MAX_STRUCTURE:,}", "Send a smaller one"
            )
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise wrong(path, value, f"can't be read as JSON: {str(error)[:100]}", "Pass a JSON schema") from None
    if not isinstance(value, Mapping):
        raise wrong(path, value, "is not a JSON schema", "Pass an object")
    return value


def check_length(session: ServedSession, text: str, param: str) -> None:
    """Raise `ApiError` for a text that is too long to encode."""
    limit = max(MOST_CHARACTERS, 8 * (session.config.max_model_len or 0))
    if len(text) > limit:
        raise wrong(param, text[:80], f"has {len(text):,} characters, more than {limit:,}", "Send it in parts")


def encode_text(session: ServedSession, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    """Return the token ids of a text, which may exceed the context. Raise `ApiError` if it is too long to encode."""
    check_length(session, text, param)
    return list(session.tokenizer.encode(text, add_special_tokens=add_special_tokens))


def submit(exchange: Exchange, active: Active, handles: Sequence[HandleLike]) -> None:
    """Submit all handles. Raise `QueueFull` if one finds no room; the others are aborted when the request ends."""
    for handle in handles:
        active.handles.append(handle)
        handle.caller = exchange.caller
        handle.submit()
    exchange.let_go()  # its requests keep the model loaded


async def wait_all(exchange: Exchange, active: Active, handles: Sequence[HandleLike]) -> list[list[Completion]]:
    """Wait for the completions of each prompt. Raise `ApiError` where they take more memory than one request may."""
    results = Results(exchange.account)
    completions = []
    for handle in handles:
        async for delta in handle:
            active.started()
            if not handle.sampling.scored:
                break
            results.add(delta)
        result = await handle
        completions.append(result if isinstance(result, list) else [result])
    _record(exchange, completions, streamed=False)
    return completions


async def follow(
    exchange: Exchange,
    active: Active,
    handles: Sequence[HandleLike],
    write: Callable[[int, TextDelta], Awaitable[None]],
) -> list[list[Completion]]:
    """Call `write` with each delta and the number of its prompt. Return the completions of each prompt at the end."""
    metrics = exchange.service.metrics
    results = Results(exchange.account)

    async def read(number: int, handle: HandleLike) -> None:
        clock = metrics.clock(exchange.model)
        async for delta in handle:
            active.started()
            clock(delta)
            results.add(delta)
            await write(number, delta)

    if len(handles) == 1:
        await read(0, handles[0])
    else:
        errors: list[Exception] = []

        async def guarded(number: int, handle: HandleLike, scope: anyio.CancelScope) -> None:
            try:
                await read(number, handle)
            except Exception as error:
                errors.append(error)
                scope.cancel()

        async with anyio.create_task_group() as group:
            for number, handle in enumerate(handles):
                group.start_soon(guarded, number, handle, group.cancel_scope)
        if errors:
            raise errors[0]
    completions = []
    for handle in handles:
        result = handle.completion()
        completions.append(result if isinstance(result, list) else [result])
    _record(exchange, completions, streamed=True)
    return completions


def _record(exchange: Exchange, completions: Sequence[Sequence[Completion]], *, streamed: bool) -> None:
    for group in completions:
        exchange.service.metrics.record(exchange.model, group, streamed=streamed)
    exchange.service.tracing.record(exchange.scope, exchange.model, exchange.request_id, completions)


def usage(completions: Sequence[Sequence[Completion]]) -> dict[str, Any]:
    """Return OpenAI's usage object. A prompt counts once, however many choices it has."""
    prompt = sum(group[0].usage.prompt_tokens for group in completions)
    generated = sum(completion.usage.completion_tokens for group in completions for completion in group)
    cached = sum(max(completion.usage.cached_tokens for completion in group) for group in completions)
    total = usage_object(prompt, generated, cached)
    replies = [completion for group in completions for completion in group if completion.reply is not None]
    if replies:
        number = sum(completion.usage.reasoning_tokens for completion in replies)
        total["completion_tokens_details"] = {"reasoning_tokens": number}
    return total


def usage_object(prompt: int, generated: int, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated, **details}


def token_members(delta: TextDelta) -> str:
    """Return the members of a chunk's choice that `return_token_ids` adds for each token, as JSON text."""
    return f',"token_ids":{dumps(delta.token_ids)},"weights_versions":{dumps(delta.weights_versions)}'


class Chunks:
    """Writes the chunks of a stream; their common members are serialised once."""

    def __init__(self, common: Mapping[str, Any], *, options: Mapping[str, Any]) -> None:
        self._head = "data: " + dumps({**common, "system_fingerprint": FINGERPRINT})[:-1] + ',"choices":['
        self.include_usage: bool = bool(options.get("include_usage"))
        self.continuous: bool = self.include_usage and bool(options.get("continuous_usage_stats"))
        self._plain = '],"usage":null}\n\n' if self.include_usage else "]}\n\n"

    def chunk(self, choice: str, now: Mapping[str, Any] | None = None, extra: str = "") -> str:
        """Return a chunk with one choice; `now` is the usage so far, if the client requests it."""
        if now is not None:
            return f'{self._head}{choice}],"usage":{dumps(now)}{extra}}}\n\n'
        return f"{self._head}{choice}{self._plain}" if not extra else f"{self._head}{choice}]{extra}{self._plain[1:]}"

    def last(self, total: Mapping[str, Any]) -> str:
        """Return the end of the stream: the usage if the client requests it, then [DONE]."""
        closing = f'{self._head}],"usage":{dumps(total)}}}\n\n' if self.include_usage else ""
        return closing + "data: [DONE]\n\n"


class Writer:
    """Writes the answer of one request for completions, of a prompt or of a chat."""

    def __init__(
        self, exchange: Exchange, fields: Mapping[str, Any], model: str, session: ServedSession, prefix: str, kind: str
    ) -> None:
        self._exchange, self._fields, self._session = exchange, fields, session
        names, as_ids = exchange.service.token_names(model, session), fields.get("return_tokens_as_token_ids", False)
        self._shapes = LogprobShapes(names, as_ids=as_ids)
        self._ids = bool(fields.get("return_token_ids"))
        name = f"{prefix}-{exchange.request_id}"
        self._common: dict[str, Any] = {"id": name, "object": kind, "created": int(time.time()), "model": model}

    async def _answer(self, completions: Sequence[Sequence[Completion]], choices: Entries) -> dict[str, Any]:
        """Return an answer that is not streamed."""
        total = usage(completions)
        return {**self._common, "choices": choices, "usage": total, "system_fingerprint": FINGERPRINT}

    async def _end(self, chunks: Chunks, completions: Sequence[Sequence[Completion]]) -> None:
        """Write the end of a stream."""
        total = usage(completions)
        await self._exchange.emit(chunks.last(total).encode())


def stream_options(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the stream options of a request. Raise `ApiError` if it has any and does not stream."""
    options: Mapping[str, Any] = fields.get("stream_options") or {}
    if options and not fields.get("stream"):
        raise wrong("stream_options", options, "is given without stream", "Add stream: true, or remove it")
    return options
