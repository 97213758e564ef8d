"""Records that a fleet and its replicas send each other. All can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.records import TokenEvent
from rekindle._src.core.sampling import Sampling
from rekindle._src.replicas.request_codec import Sent
from rekindle._src.replicas.roles import Role
from rekindle._src.session.sharing.source import PageAddress


class ReplicaInfo(NamedTuple):
    """A replica's model, as far as the fleet needs it for the intake of requests."""

    config: EngineConfig  # resolved
    tokenizer: Any
    chat: Any  # its template, or None
    vocab_size: int
    hidden_size: int
    longest: int | None
    sampling: Sampling | None
    think_ids: tuple[int, int] | None
    processors: tuple[str, ...]
    places: int  # sequences that it has room for
    pid: int
    host: str
    pages: PageAddress | None = None  # the address where other replicas take its pages


class Weights(NamedTuple):
    """Weights that replicas have or will take."""

    number: int  # of the swap; 0: the weights that the replicas were opened with
    name: str  # a folder or hub id; empty with 0


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

    async def send(self, sender: str, requests: tuple[Sent, ...], ended: tuple[str, ...]) -> None:
        """Send it requests, and the ids of requests to abort."""
        ...

    async def warm(self, addresses: tuple[PageAddress, ...]) -> int:
        """Let it take pages that its neighbours likely need again. Return their number."""
        ...

    async def swap_weights(self, weights: str) -> None:
        """Swap its weights for those of a folder or hub id. Raise the session's error."""
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
