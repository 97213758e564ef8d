"""Completions with events, and an exchange that keeps what is sent over it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from helpers.sessions import byte_tokenizer
from rekindle import Completion, FinishReason, Sampling, Timings, Usage
from rekindle._src.core.reply import ReplyEvent, fold
from rekindle._src.serve.exchange import Exchange, Service
from rekindle._src.serve.life import Life
from rekindle._src.serve.models import Models


def completion(text: str, *, events: Sequence[ReplyEvent] = (), reason: FinishReason = FinishReason.EOS) -> Completion:
    """A completion of four tokens, of a prompt of ten, with a reply that was read."""
    times = Timings(queued=0.0, first_token=0.1, total=0.2)
    reply = fold(events) if events else None
    return Completion(
        "r0", text, (1, 2, 3, 4), reason, "", (5,) * 10, Usage(10, 4, 4), times, Sampling(seed=0), reply=reply
    )


class _Session:
    tokenizer = byte_tokenizer()
    model = "m"

    def submit(self) -> None: ...


def exchange_for() -> tuple[Exchange, Any]:
    """An exchange, and something like a session."""
    session: Any = _Session()
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    service = Service(Models(session), Life(max_queued_tokens=1000))
    exchange = Exchange(service, {"headers": [], "path": "/"}, send)
    exchange.messages = messages  # type: ignore[attr-defined]
    return exchange, session


def sent(exchange: Any) -> list[Any]:
    """The data of the events that went over it."""
    data = b"".join(message.get("body", b"") for message in exchange.messages).decode()
    return [json.loads(line[6:]) for line in data.split("\n") if line.startswith("data: ")]


def no_pictures(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Reads the pictures of messages that have none."""
    raise AssertionError(f"{path} is no picture")
