"""`/v1/chat/completions`: answer a conversation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.core.records import Completion, TextDelta
from rekindle._src.serve.contract import HandleLike, SessionLike
from rekindle._src.serve.errors import wrong
from rekindle._src.serve.exchange import Exchange, dumps
from rekindle._src.serve.generation import (
    Chunks,
    counted,
    finish_of,
    finished,
    follow,
    make,
    model_of,
    stream_options,
    submit,
    usage,
)
from rekindle._src.serve.life import CHARACTERS_PER_TOKEN, Active
from rekindle._src.serve.logprobs import Shapes
from rekindle._src.serve.messages_in import plain_messages
from rekindle._src.serve.sampling import rest_of_context, sampling_options
from rekindle._src.serve.service import FINGERPRINT

_OWN_FIELDS = frozenset(
    ("messages", "tools", "template", "documents", "add_generation_prompt", "continue_final_message")
)


async def chat(exchange: Exchange, given: dict[str, Any]) -> None:
    """Answer a request for chat completions."""
    served, session = model_of(exchange, given)
    exchange.names = {**exchange.names, "max_tokens": _limit_field(given), "logprobs": "top_logprobs"}
    options = {**chat_options(given, session), **template_options(exchange, given)}
    messages = plain_messages(given["messages"])
    streaming = stream_options(given)
    tokens = exchange.size // CHARACTERS_PER_TOKEN + 1
    with exchange.service.life.request(exchange.request_id, exchange.key, tokens) as active:
        handle = await make(exchange, lambda: session.chat(messages, **options))
        submit(active, [handle])
        writer = _Writer(exchange, given, served.name, session, handle)
        if given.get("stream"):
            await writer.stream(active, streaming)
            return
        found = await finished(exchange, active, [handle])
        await exchange.reply(writer.whole(found))


def _limit_field(given: Mapping[str, Any]) -> str:
    return "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"


def chat_options(given: Mapping[str, Any], session: SessionLike) -> dict[str, Any]:
    """The sampling options of a chat."""
    options = sampling_options(given, session)
    options["max_tokens"] = given.get(_limit_field(given), rest_of_context(session))
    if given.get("top_logprobs") is not None and not given.get("logprobs"):
        raise wrong("top_logprobs", given["top_logprobs"], "is given without logprobs", "Add logprobs: true")
    if given.get("logprobs"):
        options["logprobs"] = given.get("top_logprobs", 0)
    return options


def template_options(exchange: Exchange, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `session.chat` that the template reads."""
    options: dict[str, Any] = {}
    variables: dict[str, Any] = dict(given.get("chat_template_kwargs") or {})
    for name in _OWN_FIELDS & variables.keys():
        raise wrong(f"chat_template_kwargs.{name}", variables[name], "is a field of its own", f"Pass {name} beside it")
    if "reasoning_effort" in given:
        variables.setdefault("reasoning_effort", given["reasoning_effort"])
        if given["reasoning_effort"] == "none":
            variables.setdefault("enable_thinking", False)
    if given.get("continue_final_message"):
        if given.get("add_generation_prompt"):
            fix = "Set one of the two"
            raise wrong("add_generation_prompt", True, "contradicts continue_final_message", fix)
        options["continue_final_message"] = True
    elif "add_generation_prompt" in given:
        variables["add_generation_prompt"] = given["add_generation_prompt"]
    if "documents" in given:
        variables["documents"] = given["documents"]
    if "chat_template" in given:
        if not exchange.service.trust_templates:
            fix = "Remove it, or start the server with --trust-request-chat-template"
            raise wrong("chat_template", given["chat_template"], "is not accepted by this server", fix)
        options["template"] = given["chat_template"]
    if given.get("add_special_tokens"):
        raise wrong("add_special_tokens", True, "is not possible: the template writes them", "Remove it")
    if variables:
        options["template_options"] = variables
    return options


class _Writer:
    """Writes the answer of one request."""

    def __init__(
        self, exchange: Exchange, given: Mapping[str, Any], model: str, session: SessionLike, handle: HandleLike
    ) -> None:
        self._exchange, self._given, self._handle = exchange, given, handle
        names = exchange.service.token_names(model, session)
        self._shapes = Shapes(names, as_ids=given.get("return_tokens_as_token_ids", False))
        self._common: dict[str, Any] = {
            "id": f"chatcmpl-{exchange.request_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
        }
        self._ids = bool(given.get("return_token_ids"))
        self._before = _echoed(given)

    def whole(self, found: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """The answer that is not streamed."""
        (several,) = found
        choices = []
        for done in several:
            choice: dict[str, Any] = {
                "index": done.index,
                "message": {"role": "assistant", "content": self._before + done.text, "refusal": None},
                "logprobs": self._shapes.chat(done.logprobs or ()) if self._given.get("logprobs") else None,
                "finish_reason": finish_of(done.finish_reason),
                "stop_reason": done.stop_reason,
            }
            if self._ids:
                choice["token_ids"] = done.token_ids
            choices.append(choice)
        answer = {**self._common, "choices": choices, "usage": usage(found), "system_fingerprint": FINGERPRINT}
        if "prompt_logprobs" in self._given:
            answer["prompt_logprobs"] = self._shapes.prompt(several[0].prompt_logprobs or ())
        if self._ids:
            answer["prompt_token_ids"] = several[0].prompt_token_ids
        return answer

    async def stream(self, active: Active, options: Mapping[str, Any]) -> None:
        """Write chunks while they come."""
        chunks = Chunks({**self._common, "object": "chat.completion.chunk"}, options=options)
        begun: set[int] = set()
        made = 0

        async def write(number: int, delta: TextDelta) -> None:
            nonlocal made
            made += len(delta.token_ids)
            now = counted(len(self._handle.prompt_token_ids), made) if chunks.continuous else None
            parts: list[str] = []
            if delta.index not in begun:
                content = f'"role":"assistant","content":{dumps(self._before)}'
                extra = self._extra(delta) if not begun else ""
                parts.append(chunks.chunk(_choice(delta.index, content), now, extra))
                begun.add(delta.index)
            logprobs = self._shapes.chat(delta.logprobs) if self._given.get("logprobs") else None
            ids = f',"token_ids":{dumps(delta.token_ids)}' if self._ids else ""
            if delta.text or delta.logprobs or (ids and delta.token_ids):
                content = f'"content":{dumps(delta.text)}'
                parts.append(chunks.chunk(_choice(delta.index, content, logprobs, more=ids), now))
            if delta.finish_reason is not None:
                reason = f',"stop_reason":{dumps(delta.stop_reason)}'
                parts.append(chunks.chunk(_choice(delta.index, "", None, finish_of(delta.finish_reason), reason), now))
            await self._exchange.emit("".join(parts).encode())

        found = await follow(self._exchange, active, [self._handle], write)
        await self._exchange.emit(chunks.last(usage(found)).encode())

    def _extra(self, delta: TextDelta) -> str:
        """What the first chunk has beside its choice."""
        extra = ""
        if "prompt_logprobs" in self._given:
            extra += f',"prompt_logprobs":{dumps(self._shapes.prompt(delta.prompt_logprobs))}'
        if self._ids:
            extra += f',"prompt_token_ids":{dumps(self._handle.prompt_token_ids)}'
        return extra


def _choice(index: int, delta: str, logprobs: Any = None, reason: str | None = None, more: str = "") -> str:
    """A choice of a chunk as JSON; this is made for each token, so it is put together from text."""
    scores = "null" if logprobs is None else dumps(logprobs)
    ended = "null" if reason is None else f'"{reason}"'
    return f'{{"index":{index},"delta":{{{delta}}},"logprobs":{scores},"finish_reason":{ended}{more}}}'


def _echoed(given: Mapping[str, Any]) -> str:
    """The text of the last message, if the answer goes on with it and shall show it."""
    if not given.get("echo") or not given.get("continue_final_message"):
        return ""
    last = plain_messages(given["messages"][-1:])[0]
    return str(last.get("content", ""))
