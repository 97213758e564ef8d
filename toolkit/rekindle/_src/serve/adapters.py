"""The endpoints that load and unload adapters of a server's models."""

from __future__ import annotations

from typing import Any

from rekindle._src.serve.errors import ApiError, wrong
from rekindle._src.serve.exchange import Dialect, Exchange, Handler, OpenAI
from rekindle._src.serve.fields import Boolean, Endpoint, Field, Name, PathText, ignored
from rekindle._src.serve.generation import model_of
from rekindle._src.serve.info import MODEL
from rekindle._src.serve.models import AdaptedSession
from rekindle.errors import ConfigError

# Off by default: a client that may call these can have the server read any folder that its process can read.
_ADAPTER_NAME = Field("lora_name", Name(), "The adapter's name.", required=True)
LOAD_ADAPTER = Endpoint(
    "/v1/load_lora_adapter",
    "Load an adapter from a folder of the server",
    (
        MODEL,
        _ADAPTER_NAME,
        Field("lora_path", PathText(), "A PEFT folder, or a GGUF file.", required=True),
        Field("load_inplace", Boolean(), "Replace the adapter that has the name; false by default."),
        ignored("base_model_name", "Not used."),
    ),
)
UNLOAD_ADAPTER = Endpoint(
    "/v1/unload_lora_adapter",
    "Forget an adapter and its cached pages",
    (MODEL, _ADAPTER_NAME, ignored("lora_int_id", "Not used.")),
)


async def _adaptable(exchange: Exchange, fields: dict[str, Any]) -> Any:
    _, session = await model_of(exchange, fields)
    if isinstance(session, AdaptedSession) or not hasattr(session, "load_adapter"):
        raise ApiError(400, "the model takes no adapters here. Name one that is open in the server", param="model")
    return session


async def load_adapter(exchange: Exchange, fields: dict[str, Any]) -> None:
    session, name = await _adaptable(exchange, fields), fields["lora_name"]
    if name in exchange.service.models.by_name:  # a request with this name would get the model, without a word
        raise wrong("lora_name", name, "is the name of a model here", "Choose another name for the adapter")
    if name in session.adapters and not fields.get("load_inplace"):
        raise ApiError(400, f"the adapter {name!r} is loaded. Unload it first, or send load_inplace", param="lora_name")
    try:
        await session.load_adapter(name, fields["lora_path"])
    except ConfigError as error:  # such as a rank for which the session has no room
        names = {"adapter": "lora_name", "source": "lora_path"}
        raise wrong(names.get(error.field, error.field), error.value, error.problem, error.fix) from error
    await exchange.reply({"id": name, "object": "adapter", "loaded": True})


async def unload_adapter(exchange: Exchange, fields: dict[str, Any]) -> None:
    session, name = await _adaptable(exchange, fields), fields["lora_name"]
    if name not in session.adapters:
        raise ApiError(404, f"the adapter {name!r} is not loaded here", param="lora_name", code="model_not_found")
    await session.unload_adapter(name)
    await exchange.reply({"id": name, "object": "adapter", "loaded": False})


LOADING: tuple[tuple[Endpoint, Handler, Dialect], ...] = (
    (LOAD_ADAPTER, load_adapter, OpenAI()),
    (UNLOAD_ADAPTER, unload_adapter, OpenAI()),
)
