"""What every endpoint that generates text does alike: submit, follow, count, and say how it ended."""

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


def model_of(exchange: Exchange, given: Mapping[str, Any]) -> tuple[Served, SessionLike]:
    """The model that a request names, and its session. The request gets the id that it brings."""
    if "request_id" in given:
        exchange.rename(given["request_id"])
    served = exchange.service.models.get(given.get("model"))
    exchange.model = served.name
    return served, served.open()


_LONG_THOUGHTS = 20_000  # characters that are encoded in a thread
MOST_CHARACTERS = 1 << 20  # that are encoded to be counted, unless the context has room for more


def encoded(session: SessionLike, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    """Token ids of a text that need not fit the context. Raises `Refused` for one that is too long to be encoded."""
    most = max(MOST_CHARACTERS, 8 * (session.config.max_model_len or 0))
    if len(text) > most:
        raise wrong(param, text[:80], f"has {len(text):,} characters, more than {most:,}", "Send it in parts")
    return list(session.tokenizer.encode(text, add_special_tokens=add_special_tokens))


def submit(exchange: Exchange, active: Active, handles: Sequence[HandleLike]) -> None:
    """Queue them all; raises `QueueFull` if there is no place for one, and the request's end aborts the others."""
    for handle in handles:
        active.handles.append(handle)
        handle.caller = exchange.caller
        handle.submit()


async def finished(exchange: Exchange, active: Active, handles: Sequence[HandleLike]) -> list[list[Completion]]:
    """The completions of each prompt, once all have ended."""
    found = []
    for handle in handles:
        async for _ in handle:
            active.started()
            break
        done = await handle
        found.append(done if isinstance(done, list) else [done])
    _record(exchange, found, streamed=False)
    return found


async def follow(
    exchange: Exchange,
    active: Active,
    handles: Sequence[HandleLike],
    write: Callable[[int, TextDelta], Awaitable[None]],
) -> list[list[Completion]]:
    """Call `write` with each delta and the number of its prompt, as they come; the completions at the end."""
    metrics = exchange.service.metrics

    async def one(number: int, handle: HandleLike) -> None:
        clock = metrics.clock(exchange.model)
        async for delta in handle:
            active.started()
            clock(delta)
            await write(number, delta)

    if len(handles) == 1:
        await one(0, handles[0])
    else:
        errors: list[Exception] = []

        async def kept(number: int, handle: HandleLike, scope: anyio.CancelScope) -> None:
            try:
                await one(number, handle)
            except Exception as error:
                errors.append(error)
                scope.cancel()

        async with anyio.create_task_group() as group:
            for number, handle in enumerate(handles):
                group.start_soon(kept, number, handle, group.cancel_scope)
        if errors:
            raise errors[0]
    found = []
    for handle in handles:
        done = handle.completion()
        found.append(done if isinstance(done, list) else [done])
    _record(exchange, found, streamed=True)
    return found


def _record(exchange: Exchange, found: Sequence[Sequence[Completion]], *, streamed: bool) -> None:
    for completions in found:
        exchange.service.metrics.ended(exchange.model, completions, streamed=streamed)
    exchange.service.tracing.ended(exchange.scope, exchange.model, exchange.request_id, found)


async def usage(exchange: Exchange, found: Sequence[Sequence[Completion]], session: SessionLike) -> dict[str, Any]:
    """OpenAI's usage object; a prompt counts once, however many choices it has."""
    prompt = sum(several[0].usage.prompt_tokens for several in found)
    made = sum(one.usage.completion_tokens for several in found for one in several)
    total = counted(prompt, made, sum(max(one.usage.cached_tokens for one in several) for several in found))
    flat = [one for several in found for one in several if one.reply is not None]
    if flat:

        def thought() -> int:
            return sum(reasoning_tokens(one, session) for one in flat)

        quick = sum(len(one.reasoning or "") for one in flat) < _LONG_THOUGHTS
        number = thought() if quick else await exchange.run_in_turn(thought)
        total["completion_tokens_details"] = {"reasoning_tokens": number}
    return total


def reasoning_tokens(done: Completion, session: SessionLike) -> int:
    """How many tokens the model's thoughts have, without the tags around them."""
    return len(session.tokenizer.encode(done.reasoning, add_special_tokens=False)) if done.reasoning else 0


def counted(prompt: int, made: int, cached: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object from its numbers."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made, **details}


class Chunks:
    """Writes chunks of a stream; what all of them have in common is written once."""

    def __init__(self, common: Mapping[str, Any], *, options: Mapping[str, Any]) -> None:
        self._head = "data: " + dumps({**common, "system_fingerprint": FINGERPRINT})[:-1] + ',"choices":['
        self.include_usage: bool = bool(options.get("include_usage"))
        self.continuous: bool = self.include_usage and bool(options.get("continuous_usage_stats"))
        self._plain = '],"usage":null}\n\n' if self.include_usage else "]}\n\n"

    def chunk(self, choice: str, now: Mapping[str, Any] | None = None, extra: str = "") -> str:
        """One chunk with one choice, `now` being the usage so far if that was asked for."""
        if now is not None:
            return f'{self._head}{choice}],"usage":{dumps(now)}{extra}}}\n\n'
        return f"{self._head}{choice}{self._plain}" if not extra else f"{self._head}{choice}]{extra}{self._plain[1:]}"

    def last(self, total: Mapping[str, Any]) -> str:
        """What closes the stream: the usage if it was asked for, then [DONE]."""
        closing = f'{self._head}],"usage":{dumps(total)}}}\n\n' if self.include_usage else ""
        return closing + "data: [DONE]\n\n"


def stream_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The stream options of a request; raises `Refused` if it has some and does not stream."""
    options: Mapping[str, Any] = given.get("stream_options") or {}
    if options and not given.get("stream"):
        raise wrong("stream_options", options, "is given without stream", "Add stream: true, or remove it")
    return options
