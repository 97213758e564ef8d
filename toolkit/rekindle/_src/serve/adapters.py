"""The endpoints that load and unload adapters while a server runs; they are off by default.

A client that may call them can have the server read any folder that its process can read.
"""

from __future__ import annotations

from typing import Any

from rekindle._src.serve.errors import Refused
from rekindle._src.serve.exchange import Exchange
from rekindle._src.serve.fields import Endpoint, Field, Flag, Text, ignored
from rekindle._src.serve.generation import model_of
from rekindle._src.serve.models import AdaptedSession

_MODEL = Field("model", Text(maximum=512), "The name of a served model; may be left out.")
_NAME = Field("lora_name", Text(maximum=256, minimum=1), "The adapter's name.", required=True)
LOAD = Endpoint(
    "/v1/load_lora_adapter",
    "Load an adapter from a folder of the server",
    (
        _MODEL,
        _NAME,
        Field("lora_path", Text(maximum=4096, minimum=1), "A PEFT folder, or a GGUF file.", required=True),
        Field("load_inplace", Flag(), "Replace the adapter that has the name; false by default."),
        ignored("base_model_name", "Not used."),
    ),
)
UNLOAD = Endpoint(
    "/v1/unload_lora_adapter",
    "Forget an adapter and its cached pages",
    (_MODEL, _NAME, ignored("lora_int_id", "Not used.")),
)


def _session(exchange: Exchange, fields: dict[str, Any]) -> Any:
    _, session = model_of(exchange, fields)
    if isinstance(session, AdaptedSession) or not hasattr(session, "load_adapter"):
        raise Refused(400, "the model takes no adapters here. Name one that is open in the server", param="model")
    return session


async def load(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Load an adapter under a name."""
    session, name = _session(exchange, fields), fields["lora_name"]
    if name in session.adapters and not fields.get("load_inplace"):
        raise Refused(400, f"the adapter {name!r} is loaded. Unload it first, or send load_inplace", param="lora_name")
    exchange.names = {**exchange.names, "adapter": "lora_name"}
    await session.load_adapter(name, fields["lora_path"])
    await exchange.reply({"id": name, "object": "adapter", "loaded": True})


async def unload(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Forget an adapter."""
    session, name = _session(exchange, fields), fields["lora_name"]
    if name not in session.adapters:
        raise Refused(404, f"the adapter {name!r} is not loaded here", param="lora_name", code="model_not_found")
    await session.unload_adapter(name)
    await exchange.reply({"id": name, "object": "adapter", "loaded": False})
