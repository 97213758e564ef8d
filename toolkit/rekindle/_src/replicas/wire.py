"""Records that a fleet and its replicas send each other, and the encoding of a request. All can be pickled.

No user object is sent: a request is plain values as JSON and token ids as bytes. A type that was passed as `schema`
stays in the fleet's process, which builds the object from the text; the description of its grammar is sent. A replica
checks a request as a session checks a caller's. The fleet has placeholders for compiled grammars.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from rekindle._src.capabilities import ENTRIES
from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.embedder import Embedder
from rekindle._src.core.extension import NONE, Extensions
from rekindle._src.core.records import Request, ResumeState, TokenEvent
from rekindle._src.core.sampling import Sampling
from rekindle._src.kvcache.sharing import PageAddress
from rekindle._src.replicas.routing import Role
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.session.session import Session


# Fields of `Sampling` that stay in the fleet's process: capabilities have the same in a form that can be sent.
STAY = frozenset[str]().union(*(entry.own_options for entry in ENTRIES))
_TRAVELS = tuple(field.name for field in dataclasses.fields(Sampling) if field.name not in STAY)
_BY_NAME = {entry.name: entry for entry in ENTRIES if entry.name}
_TOKEN = np.dtype("<i4")


class RequestMessage(NamedTuple):
    """A request in the form that is sent to a replica."""

    id: str
    fields: str  # JSON
    tokens: bytes  # of the prompt, then the generated ones
    pages: PageAddress | None = None  # of the replica that has computed its prompt
    own_call: bool = False  # in its own call: intake may take long, or end the process


class ReplicaInfo(NamedTuple):
    """A replica's model, as far as the fleet needs it for the intake of requests."""

    config: ResolvedConfig
    tokenizer: Any
    chat: Any  # its template, or None
    vocab_size: int
    embedder: Embedder
    longest: int | None
    sampling: Sampling | None
    chat_sampling: Sampling | None
    processors: tuple[str, ...]
    facts: Mapping[str, object]  # of capabilities, by their classes' names
    places: int  # sequences that it has room for
    pid: int
    host: str
    pages: PageAddress | None = None  # the address where other replicas take its pages


class SessionChange(Protocol):
    """A change that a fleet makes to the sessions of its replicas. It is pickled."""

    async def apply(self, session: Session) -> None:
        """Make it, in the replica's process. Raise the session's error."""
        ...


class WeightsVersion(NamedTuple):
    """Weights that replicas have or will take."""

    number: int  # of the swap; 0: the weights that the replicas were opened with
    name: str  # a folder or hub id; empty with 0

    async def apply(self, session: Session) -> None:
        """Swap the session's weights. Running requests keep their tokens."""
        await session.swap_weights(self.name)


class News(NamedTuple):
    """The news of one sequence since the previous mail."""

    event: TokenEvent
    waited: float | None = None  # seconds until it first ran; in the first news of a sequence


class Mail(NamedTuple):
    """A replica's message to one fleet."""

    news: tuple[News, ...]
    figures: Mapping[str, Any]  # of its session, at most a few seconds old
    silent: float  # seconds since the session's loop last answered


class Connection(Protocol):
    """A fleet's connection to one replica. Calls raise `ReplicaGone` if its process is gone or can't be reached."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> Role: ...
    async def open(self) -> ReplicaInfo:
        """Wait until its session is open. Raise the error of opening it."""
        ...

    async def send(self, sender: str, requests: tuple[RequestMessage, ...], ended: tuple[str, ...]) -> None:
        """Send it requests, and the ids of requests to abort."""
        ...

    async def warm(self, addresses: tuple[PageAddress, ...]) -> int:
        """Let it take pages that its neighbours likely need again. Return their number."""
        ...

    async def change(self, change: SessionChange) -> None:
        """Change its session. Raise the session's error."""
        ...

    async def mail(self, sender: str, patience: float) -> Mail:
        """Wait for news, but not longer than `patience` seconds."""
        ...

    def kill(self) -> None:
        """End its process. Another one takes its place."""

    def close(self) -> None:
        """End its process for good."""


class ReplicaGone(Exception):
    """The process of a replica is gone, or does not answer."""


def encode(request: Request, pages: PageAddress | None = None, *, own_call: bool = False) -> RequestMessage:
    """Encode a request. Raise if one of its values can't be sent."""
    sampling, resumed = request.sampling, request.resumed
    options = {name: getattr(sampling, name) for name in _TRAVELS}
    for extension in request.extensions.values():
        options |= extension.elsewhere
    parts = {entry.name: part for entry in ENTRIES if (part := entry.sent(request)) is not None}
    fields: dict[str, Any] = {
        "sampling": options | {"logit_bias": list(sampling.logit_bias.items())},
        "stop_ids": sorted(request.stop_ids),
        "eos_ids": sorted(request.eos_ids),
        "prompt": request.prompt_length,
        "caller": request.caller,
        "scored": None if resumed is None else resumed.scored,
        "extensions": {name: part.fields for name, part in parts.items()},
    }
    generated = b"" if resumed is None else np.asarray(resumed.token_ids, _TOKEN).tobytes()
    tokens = np.asarray(request.token_ids, _TOKEN).tobytes() + generated
    return RequestMessage(
        request.id, json.dumps(fields), tokens, pages, own_call or any(part.slow for part in parts.values())
    )


def decode(sent: RequestMessage, vocab_size: int) -> Request:
    """Decode a request, with extensions for its intake there. Raise `InvalidRequest` if it is malformed."""
    try:
        fields = json.loads(sent.fields)
        tokens, length = np.frombuffer(sent.tokens, _TOKEN).astype(np.int32), fields["prompt"]
        if not 0 < length <= len(tokens) or tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(f"it has no prompt, or token ids beyond {vocab_size - 1}")
        extensions = [_BY_NAME[name].received(part) for name, part in fields["extensions"].items()]
        options = fields["sampling"]
        return Request(
            id=sent.id,
            token_ids=tokens[:length],
            sampling=Sampling(**options | {"logit_bias": dict(options["logit_bias"])}),
            stop_ids=frozenset(fields["stop_ids"]),
            eos_ids=frozenset(fields["eos_ids"]),
            group=sent.id,
            resumed=None if fields["scored"] is None else ResumeState(tokens[length:], fields["scored"]),
            caller=str(fields["caller"]),
            extensions=Extensions(*extensions) if extensions else NONE,
        )
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest("request", sent.id, f"can't be read: {error}", "Use one version everywhere") from error
