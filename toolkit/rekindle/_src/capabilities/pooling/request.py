"""Embeddings as a capability of requests."""

from __future__ import annotations

from rekindle._src.core.extensions import PromptPooling
from rekindle._src.core.records import EmbeddingResult, IntArray, Request, Timings, TokenEvent, Usage, Vector
from rekindle._src.core.report_kinds import POOLED
from rekindle._src.dispatch.backend import Front, Submission
from rekindle._src.dispatch.capability import Capability, Part
from rekindle.errors import InvalidRequest


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
