"""The endpoints that generate nothing: health, models, version, abort, tokenize, detokenize."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import anyio.to_thread
import numpy as np

from rekindle._src.core.records import IntArray
from rekindle._src.core.version import VERSION
from rekindle._src.serve.bodies import Column, Receive, header
from rekindle._src.serve.chat import encode_chat, plain_messages, template_options
from rekindle._src.serve.content import RequestContent
from rekindle._src.serve.errors import ApiError, missing, unavailable, wrong
from rekindle._src.serve.exchange import Exchange, Handler, OpenAI, Scope, Send, Service, refusing
from rekindle._src.serve.fields import Boolean, Endpoint, Field, Items, String, TokenIds, ignored
from rekindle._src.serve.generation import encode_text, model_of
from rekindle._src.serve.openai_fields import CHAT, MESSAGE, MOST_MESSAGES

_AT_ONCE = 1 << 16  # ids that become an array at once
MOST_IDS = 1 << 18  # that are decoded at once, unless the context has room for more
MODEL = Field("model", String(maximum=512), "The name of a served model; may be left out.")
_OF_TEMPLATES = ("chat_template_kwargs", "documents", "add_generation_prompt", "continue_final_message",
                 "chat_template", "reasoning_effort", "tools")  # fmt: skip

TOKENIZE = Endpoint(
    "/tokenize",
    "The token ids of a prompt or a conversation",
    (
        MODEL,
        Field("prompt", String(), "Text; or messages."),
        Field("messages", Items(MESSAGE, minimum=1, maximum=MOST_MESSAGES), "A conversation; or a prompt."),
        Field("add_special_tokens", Boolean(), "Let the tokenizer add special tokens to a prompt; true by default."),
        Field("return_token_strs", Boolean(), "Add the spelling of each token, as token_strs."),
        *(CHAT.by_name[name] for name in _OF_TEMPLATES),
        ignored("user", "Not used."),
    ),
)
_TOKENS = Field("tokens", TokenIds(), "Token ids.", required=True)
DETOKENIZE = Endpoint("/detokenize", "The text of token ids", (MODEL, _TOKENS))
ABORT = Endpoint(
    "/abort",
    "Abort requests by the ids they were sent with",
    (
        Field("request_id", String(maximum=256, minimum=1), "The id of a request, with or without its prefix."),
        Field("request_ids", Items(String(maximum=256, minimum=1), minimum=1, maximum=10_000), "Several of them."),
    ),
)
# By the names of llama.cpp's router. The names are of the command line: no request brings a path.
LOAD_MODEL = Endpoint(
    "/models/load",
    "Load a model, or wake it",
    (Field("model", String(maximum=512, minimum=1), "The name of a served model.", required=True),),
)
UNLOAD_MODEL = Endpoint(
    "/models/unload",
    "Unload a model once no request uses it",
    (
        Field("model", String(maximum=512, minimum=1), "The name of a served model; or all."),
        Field("all", Boolean(), "Unload every model."),
    ),
)


async def tokenize(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Answer with the token ids of text or messages."""
    _, session = await model_of(exchange, fields)
    if ("prompt" in fields) == ("messages" in fields):
        raise wrong("prompt", fields.get("prompt"), "and messages: exactly one of them is needed", "Send one")
    tokenizer = session.tokenizer

    options = {} if "prompt" in fields else template_options(exchange, {**fields, "add_special_tokens": False})

    content = RequestContent(exchange, session)
    messages = await content.messages(lambda read: plain_messages(fields.pop("messages", ()), read))
    await content.fetch()

    def spellings(part: IntArray) -> list[str]:
        return [tokenizer.token(id_) for id_ in part.tolist()]

    def answer() -> dict[str, Any]:
        if "prompt" in fields:
            special = fields.get("add_special_tokens", True)
            ids = encode_text(session, fields["prompt"], add_special_tokens=special, param="prompt")
        else:
            ids = encode_chat(session, messages, options, special=fields.get("add_special_tokens", False))
        # A character outside of ASCII may be four tokens, and a client may take a minute to read them: they stay as
        # an array, and what they are written as is made piece by piece.
        tokens = np.empty(len(ids), np.int32)
        for start in range(0, len(ids), _AT_ONCE):  # other threads run in between
            tokens[start : start + _AT_ONCE] = ids[start : start + _AT_ONCE]
        exchange.account.hold(results=tokens.nbytes)
        strings = Column(tokens, spellings) if fields.get("return_token_strs") else None
        limit = session.config.max_model_len
        return {
            "count": len(tokens),
            "max_model_len": limit,
            "tokens": Column(tokens, lambda part: part.tolist()),
            "token_strs": strings,
        }

    await exchange.reply(await exchange.run_in_turn(answer))


async def detokenize(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Answer with the text of token ids, special tokens included."""
    _, session = await model_of(exchange, fields)
    count, limit = len(fields["tokens"]), max(MOST_IDS, session.config.max_model_len or 0)
    if count > limit:  # the library holds the interpreter while it decodes
        raise wrong("tokens", f"{count:,} ids", f"are over {limit:,}", "Send them in parts")
    if (unknown := max(fields["tokens"])) >= session.tokenizer.vocab_size:
        fix = f"Use ids from 0 to {session.tokenizer.vocab_size - 1}"
        raise wrong("tokens", unknown, "is not a token id of this model", fix)
    decode = partial(session.tokenizer.decode, fields["tokens"], skip_special_tokens=False)
    text = await exchange.run(decode)
    exchange.account.hold(results=sys.getsizeof(text))  # of a token that is a hundred spaces, too
    await exchange.reply({"prompt": text})


async def abort(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Abort requests. An id without a request in progress of this sender is no error."""
    ids = [*fields.get("request_ids", ()), *([fields["request_id"]] if "request_id" in fields else ())]
    if not ids:
        raise missing("request_id", "Send request_id or request_ids")
    names = {id_: {id_, _bare(id_)} for id_ in ids}  # a request's own id may look like that of an answer
    # One pass over the requests: thousands of ids must not hold the server's loop.
    there = exchange.service.life.abort(set().union(*names.values()), exchange.key)
    await exchange.reply({"aborted": [id_ for id_ in ids if not names[id_].isdisjoint(there)]})


async def load_model(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Answer when the model is loaded."""
    await exchange.service.models.get(fields["model"]).load_now(exchange)
    await exchange.reply({"success": True})


async def unload_model(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Answer when the model, or with `all` every one, is unloaded: once no request uses it."""
    models, name = exchange.service.models, fields.get("model")
    if (name is None) != bool(fields.get("all")):
        raise wrong("model", name, "and all: exactly one of them is needed", "Send a model's name, or all: true")
    for served in models.by_name.values() if name is None else (models.get(name),):
        await served.unload()
    await exchange.reply({"success": True})


def _bare(request_id: str) -> str:
    """Return the id without the prefix of an answer's `id`."""
    for prefix in ("chatcmpl-", "cmpl-", "resp_", "msg_"):
        request_id = request_id.removeprefix(prefix)
    return request_id


class Get:
    """An ASGI app that answers a GET without a body."""

    def __init__(self, service: Service, path: str, handler: Handler) -> None:
        self._service, self._path, self._handler = service, path, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._service, scope, send)
        try:
            status = await refusing(exchange, OpenAI(), partial(self._handler, exchange, scope.get("path_params", {})))
        finally:
            exchange.let_go()
        self._service.metrics.http(self._path, status)


async def health(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Answer 200 if every model is open, and 503 while one loads or is closed, or the server drains."""
    service = exchange.service
    if service.life.draining:
        raise unavailable("the server is shutting down", retry_after=None)
    if (trouble := service.models.trouble) is not None:
        raise unavailable(trouble)
    await exchange.reply({"status": "ok"})


async def list_models(exchange: Exchange, fields: dict[str, Any]) -> None:
    models = exchange.service.models.all()
    await exchange.reply({"object": "list", "data": [served.as_dict() for served in models]})


async def one_model(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Answer with one model, or 404 for an unknown name."""
    await exchange.reply(exchange.service.models.get(fields["name"]).as_dict())


async def tokenizer_info(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Answer with special tokens, template and context length, under transformers' names."""
    session = await exchange.service.models.get(None).take(exchange)
    tokenizer = session.tokenizer
    special = dict(tokenizer.special)
    if "eos_token" not in special and tokenizer.has_text and tokenizer.eos_ids:
        special["eos_token"] = tokenizer.token(tokenizer.eos_ids[0])
    limit, template = session.config.max_model_len, session.chat_template
    await exchange.reply({"eos_token": None, **special, "chat_template": template, "model_max_length": limit})


async def version(exchange: Exchange, fields: dict[str, Any]) -> None:
    await exchange.reply({"version": VERSION})


async def metrics(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Answer with Prometheus' exposition. A thread reads the figures, since it waits for the sessions' loops."""
    accept = header(exchange.scope, b"accept") or ""
    data, kind = await anyio.to_thread.run_sync(exchange.service.metrics.text, accept)
    await exchange.reply_bytes(data, kind.encode())


def not_found(path: str) -> ApiError:
    return ApiError(404, f"there is no {path[:200]!r} here. GET /openapi.json lists what there is", code="not_found")
