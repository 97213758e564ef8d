"""`/v1/embeddings`: texts as vectors."""

from __future__ import annotations

import base64
from typing import Any

from rekindle._src.serve.exchange import Exchange
from rekindle._src.serve.fields import Endpoint, Field, ignored, refused
from rekindle._src.serve.generation import model_of
from rekindle._src.serve.kinds import INT64, Choice, Flag, Text, whole
from rekindle._src.serve.life import estimate
from rekindle._src.serve.openai_fields import PROMPTS, REQUEST_ID
from rekindle._src.serve.pieces import Entries

_FIRST = 16  # inputs after which a large request no longer counts as waiting

EMBEDDINGS = Endpoint(
    "/v1/embeddings",
    "Embed texts",
    (
        Field(
            "input",
            PROMPTS,
            "A string, token ids, or a list of strings or of lists of token ids.",
            option="prompt",
            required=True,
        ),
        Field("model", Text(maximum=512), "The name of a served model; may be left out."),
        Field("encoding_format", Choice(("float", "base64")), "float by default; base64 is of little-endian float32."),
        Field("dimensions", whole(1), "Keep only so many numbers, for models trained for that."),
        Field("pooling", Choice(("mean", "last")), "Of the last layer's hidden states: their mean, or the last one."),
        Field("normalize", Flag(), "Scale each vector to length 1; true by default."),
        Field("priority", INT64, "Smaller is served first, in a session with policy='priority'."),
        Field("request_id", REQUEST_ID, "Names the request for /abort and in the log; or X-Request-Id."),
        ignored("user", "Not used."),
        refused("truncate_prompt_tokens", "shorten the input before sending it"),
    ),
)


async def embeddings(exchange: Exchange, fields: dict[str, Any]) -> None:
    """Answer a request for embeddings."""
    served, session = model_of(exchange, fields)
    options: dict[str, Any] = {name: fields[name] for name in ("dimensions", "pooling", "normalize") if name in fields}
    if fields.get("priority"):
        options["priority"] = -fields["priority"]
    inputs = fields["input"]
    vectors: list[Any] = []
    tokens = 0
    with exchange.takes_on(estimate(inputs)) as active:
        for part in (inputs[:_FIRST], inputs[_FIRST:]):
            if part:
                call = session.embed(part, **options)
                active.handles.append(call)
                vectors += list(await call)
                tokens += call.usage.prompt_tokens
                active.started()

    def entry(numbered: tuple[int, Any]) -> dict[str, Any]:
        return {"object": "embedding", "index": numbered[0], "embedding": _shape(numbered[1], fields)}

    data = Entries([*enumerate(vectors)], entry)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    await exchange.reply({"object": "list", "data": data, "model": served.name, "usage": usage})


def _shape(vector: Any, fields: dict[str, Any]) -> Any:
    if fields.get("encoding_format") == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
