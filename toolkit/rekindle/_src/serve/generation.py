"""The steps that all endpoints that generate text share: submit, follow, count, and report how it ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio

from rekindle._src.core.records import Completion, TextDelta
from rekindle._src.serve.contract import HandleLike, SessionLike
from rekindle._src.serve.errors import wrong
from rekindle._src.serve.exchange import Exchange, dumps
from rekindle._src.serve.life import Active
from rekindle._src.serve.models import Served
from rekindle._src.serve.service import FINGERPRINT


def model_of(exchange: Exchange, fields: Mapping[str, Any]) -> tuple[Served, SessionLike]:
    """Return the model that a request names, and its session. Rename the exchange if the body has a request_id."""
    if "request_id" in fields:
        exchange.rename(fields["request_id"])
    served = exchange.service.models.get(fields.get("model"))
    exchange.model = served.name
    return served, served.open()


_LONG_THOUGHTS = 20_000  # characters of reasoning from which encoding runs in a thread
MOST_CHARACTERS = 1 << 20  # of a text to encode at most, unless the context has room for more


def encode_text(session: SessionLike, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    """Return the token ids of a text, which may exceed the context. Raise `Refused` if it is too long to encode."""
    limit = max(MOST_CHARACTERS, 8 * (session.config.max_model_len or 0))
    if len(text) > limit:
        raise wrong(param, text[:80], f"has {len(text):,} characters, more than {limit:,}", "Send it in parts")
    return list(session.tokenizer.encode(text, add_special_tokens=add_special_tokens))


def submit(exchange: Exchange, active: Active, handles: Sequence[HandleLike]) -> None:
    """Submit all handles. Raise `QueueFull` if one finds no room; the others are aborted when the request ends."""
    for handle in handles:
        active.handles.append(handle)
        handle.caller = exchange.caller
        handle.submit()


async def wait_all(exchange: Exchange, active: Active, handles: Sequence[HandleLike]) -> list[list[Completion]]:
    """Wait for all handles, and return the completions of each prompt."""
    completions = []
    for handle in handles:
        async for _ in handle:
            active.started()
            break
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

    async def read(number: int, handle: HandleLike) -> None:
        clock = metrics.clock(exchange.model)
        async for delta in handle:
            active.started()
            clock(delta)
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


async def usage(
    exchange: Exchange, completions: Sequence[Sequence[Completion]], session: SessionLike
) -> dict[str, Any]:
    """Return OpenAI's usage object. A prompt counts once, however many choices it has."""
    prompt = sum(group[0].usage.prompt_tokens for group in completions)
    generated = sum(completion.usage.completion_tokens for group in completions for completion in group)
    total = usage_object(
        prompt, generated, sum(max(completion.usage.cached_tokens for completion in group) for group in completions)
    )
    replies = [completion for group in completions for completion in group if completion.reply is not None]
    if replies:

        def count_reasoning() -> int:
            return sum(reasoning_tokens(completion, session) for completion in replies)

        short = sum(len(completion.reasoning or "") for completion in replies) < _LONG_THOUGHTS
        number = count_reasoning() if short else await exchange.run_in_turn(count_reasoning)
        total["completion_tokens_details"] = {"reasoning_tokens": number}
    return total


def reasoning_tokens(completion: Completion, session: SessionLike) -> int:
    """Return the number of tokens of the model's reasoning, without the tags around it."""
    return len(session.tokenizer.encode(completion.reasoning, add_special_tokens=False)) if completion.reasoning else 0


def usage_object(prompt: int, generated: int, cached: int | None = None) -> dict[str, Any]:
    """Return OpenAI's usage object for these numbers."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated, **details}


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


def stream_options(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the stream options of a request. Raise `Refused` if it has any and does not stream."""
    options: Mapping[str, Any] = fields.get("stream_options") or {}
    if options and not fields.get("stream"):
        raise wrong("stream_options", options, "is given without stream", "Add stream: true, or remove it")
    return options
