"""The encoding of a request for a replica: plain values as JSON, token ids as bytes.

No user object is pickled. A type that was passed as `schema` stays in the fleet's process, which builds the object
from the text; the description of its grammar is sent. A replica checks a request as a session checks a caller's.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import numpy as np

from rekindle._src.core.records import Request, Resumed
from rekindle._src.core.sampling import Sampling
from rekindle._src.replicas.remote_grammars import RemoteGuide
from rekindle._src.session.sharing.source import PageAddress
from rekindle._src.structured.guide import Reasoning
from rekindle._src.structured.spec import Spec
from rekindle._src.structured.token_rules import RestrictedGuide
from rekindle.errors import InvalidRequest

# The fields of `Sampling` for the structure of a text: its guide has the same in a form that can be sent.
STRUCTURE = frozenset(("schema", "regex", "choice", "grammar", "json", "lenient", "whitespace_flexible"))
_TRAVELS = tuple(field.name for field in dataclasses.fields(Sampling) if field.name not in STRUCTURE)
_TOKEN = np.dtype("<i4")


class Sent(NamedTuple):
    """A request in the form that is sent to a replica."""

    id: str
    fields: str  # JSON
    tokens: bytes  # of the prompt, then the generated ones
    pages: PageAddress | None = None  # of the replica that has computed its prompt
    own_call: bool = False  # in its own call: intake may take long, or end the process


class Received(NamedTuple):
    """A request as a replica decodes it. Its guide, if any, is built from the description beside it."""

    request: Request
    guide: RemoteGuide | None


def encode(request: Request, pages: PageAddress | None = None, *, own_call: bool = False) -> Sent:
    """Encode a request. Raise if one of its values can't be sent."""
    sampling, resumed, guide = request.sampling, request.resumed, _remote(request)
    options = {name: getattr(sampling, name) for name in _TRAVELS}
    fields: dict[str, Any] = {
        "sampling": options | {"logit_bias": list(sampling.logit_bias.items())},
        "stop_ids": sorted(request.stop_ids),
        "eos_ids": sorted(request.eos_ids),
        "pooling": request.pooling,
        "prompt": request.prompt_length,
        "caller": request.caller,
        "scored": None if resumed is None else resumed.scored,
    }
    if guide is not None:
        fields["guide"] = {
            "spec": dataclasses.asdict(guide.spec),
            "eos_ids": sorted(guide.eos_ids),
            "reasoning": guide.reasoning,
            "budget": guide.budget,
            "covered": guide.covered,
        }
    generated = b"" if resumed is None else np.asarray(resumed.token_ids, _TOKEN).tobytes()
    tokens = np.asarray(request.token_ids, _TOKEN).tobytes() + generated
    return Sent(request.id, json.dumps(fields), tokens, pages, own_call or guide is not None)


def decode(sent: Sent, vocab_size: int) -> Received:
    """Decode a request. Raise `InvalidRequest` if it is malformed."""
    try:
        fields = json.loads(sent.fields)
        tokens, length, guide = np.frombuffer(sent.tokens, _TOKEN).astype(np.int32), fields["prompt"], None
        if not 0 < length <= len(tokens) or tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(f"it has no prompt, or token ids beyond {vocab_size - 1}")
        if (description := fields.get("guide")) is not None:
            reasoning = None if description["reasoning"] is None else Reasoning(*description["reasoning"])
            guide = RemoteGuide(Spec(**description["spec"]), description["eos_ids"], reasoning, description["budget"])
            guide.covered = list(description["covered"])
        options = fields["sampling"]
        request = Request(
            id=sent.id,
            token_ids=tokens[:length],
            sampling=Sampling(**options | {"logit_bias": dict(options["logit_bias"])}),
            stop_ids=frozenset(fields["stop_ids"]),
            eos_ids=frozenset(fields["eos_ids"]),
            group=sent.id,
            pooling=fields["pooling"],
            resumed=None if fields["scored"] is None else Resumed(tokens[length:], fields["scored"]),
            caller=str(fields["caller"]),
        )
    except (TypeError, ValueError, LookupError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest("request", sent.id, f"can't be read: {error}", "Use one version everywhere") from error
    return Received(request, guide)


def _remote(request: Request) -> RemoteGuide | None:
    guide = request.guide
    if isinstance(guide, RestrictedGuide):  # its rules follow from the options, and are built where it runs
        guide = guide.inner
    assert guide is None or isinstance(guide, RemoteGuide), "a fleet compiles no grammars"
    return guide
