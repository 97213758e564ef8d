"""Embeddings as a capability of requests."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.records import (
    EmbeddingResult,
    IntArray,
    Pooling,
    Request,
    Row,
    RowResult,
    Timings,
    TokenEvent,
    Usage,
    Vector,
)
from rekindle._src.core.report import Report
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.capability import Capability, Part
from rekindle._src.kvcache import PrefixCache
from rekindle._src.scheduling.followers import FollowedExtension, Follower
from rekindle.errors import InvalidRequest

POOLED: Report[Vector] = Report("pooled")  # of an embedded prompt: a chunk's states, at its end the states of all


class PoolingFollower(Follower):
    """Adds up the vectors of a prompt's chunks, or keeps the last or the first one. The first chunk begins anew.

    The vector of the last token needs no other position's, so that these may come from the cache.
    """

    __slots__ = ("_length", "_pooling", "_vector")

    def __init__(self, request: Request, pooling: Pooling) -> None:
        self._length, self._pooling = request.prompt_length, pooling
        self._vector: NDArray[np.float64] | None = None

    def reusable(self, known: int) -> int:
        return known - 1 if self._pooling == "last" else 0

    def take(self, row: Row, output: RowResult) -> RowResult:
        (pooled,) = POOLED.of(output)
        if not np.isfinite(pooled).all():
            return output._replace(finite=False)
        chunk = pooled.astype(np.float64)
        if self._pooling == "last" or self._vector is None or row.start == 0:
            self._vector = chunk
        elif self._pooling == "mean":
            self._vector += chunk
        whole = (self._vector / self._length if self._pooling == "mean" else self._vector).astype(np.float32)
        return output.reporting(POOLED, *([whole] if row.start + row.length >= self._length else []))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PromptPooling(FollowedExtension):
    """The prompt is embedded: its hidden states are pooled, and nothing is generated."""

    kind: Pooling

    @property
    def generates(self) -> bool:
        return False

    def reusable(self, prompt_length: int) -> int:
        return prompt_length - 1 if self.kind == "last" else 0

    def follower(self, request: Request, cache: PrefixCache | None) -> Follower:
        return PoolingFollower(request, self.kind)


class EmbeddingIntake(Capability[None]):
    """A prompt is embedded rather than continued."""

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: None) -> PromptPooling | None:
        pooling = submission.extensions.get(PromptPooling)
        if front.embedder.alone and pooling is None:
            problem = "is for embed only: its texts have no next token"
            raise InvalidRequest("model", front.model, problem, "Use session.embed, or POST /v1/embeddings")
        return pooling

    def part(self, request: Request, submission: Submission, front: Front) -> Part | None:
        return EmbeddingOutput() if PromptPooling in request.extensions else None


class EmbeddingOutput(Part[None]):
    __slots__ = ("_vector",)

    def __init__(self) -> None:
        self._vector: Vector | None = None

    def take(self, event: TokenEvent) -> None:
        for vector in POOLED.of(event):
            self._vector = vector

    def outcome(self, usage: Usage, timings: Timings) -> EmbeddingResult:
        assert self._vector is not None, "a prompt's end comes with its vector"
        return EmbeddingResult(self._vector, usage, timings)
