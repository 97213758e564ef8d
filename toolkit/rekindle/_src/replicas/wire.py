"""What a fleet and its replicas send each other; all of it can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.records import TokenEvent
from rekindle._src.core.sampling import Sampling
from rekindle._src.replicas.request_codec import Sent
from rekindle._src.replicas.roles import Role
from rekindle._src.session.sharing.source import PageAddress


class Described(NamedTuple):
    """What the fleet has to know of the model that its replicas run, so that it can take requests in."""

    config: EngineConfig  # resolved
    tokenizer: Any
    chat: Any  # its template, or None
    vocab_size: int
    hidden_size: int
    longest: int | None
    sampling: Sampling | None
    think_ids: tuple[int, int] | None
    processors: tuple[str, ...]
    places: int  # for sequences
    pid: int
    host: str
    pages: PageAddress | None = None  # where other replicas take its pages


class Weights(NamedTuple):
    """Weights that replicas have taken or are to take."""

    number: int  # of the swap that brought them; 0: those that they were opened with
    name: str  # a folder or hub id; empty with 0


class News(NamedTuple):
    """What happened to one sequence since the mail before."""

    event: TokenEvent
    waited: float | None = None  # seconds until it first ran; in the first news of a sequence


class Mail(NamedTuple):
    """What a replica has to tell one fleet."""

    news: tuple[News, ...]
    figures: Mapping[str, Any]  # of its session, at most a few seconds old
    silent: float  # seconds since the session's loop last answered


class Connection(Protocol):
    """A fleet's way to one replica. Calls raise `ReplicaGone` when its process is gone or can't be reached."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> Role: ...
    async def open(self) -> Described:
        """Wait until its session is open; raises what opening raised."""
        ...

    async def send(self, sender: str, requests: tuple[Sent, ...], ended: tuple[str, ...]) -> None:
        """Give it requests, and the ids of those that are no longer wanted."""
        ...

    async def warm(self, addresses: tuple[PageAddress, ...]) -> int:
        """Have it take pages that its neighbours are likely to need again; how many."""
        ...

    async def swap_weights(self, weights: str) -> None:
        """Have it go on with other weights, a folder or hub id; raises what the session raised."""
        ...

    async def mail(self, sender: str, patience: float) -> Mail:
        """Wait for news, but not longer than `patience` seconds."""
        ...

    def kill(self) -> None:
        """End its process, so that another one takes its place."""

    def close(self) -> None:
        """End its process for good."""


class ReplicaGone(Exception):
    """The process of a replica is gone, or does not answer."""
