"""The small model that drafts for a session, as a value; and the check that it has the model's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rekindle._src.models.base import Graph, Placement
from rekindle._src.opening.source import CheckpointSource
from rekindle._src.programs.draft_model import DraftShapes
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import ConfigError

_FEW = 32  # characters of a token in an error


class DraftPlan(NamedTuple):
    """All that is known of the small model before its weights are read."""

    name: str
    folder: Path  # of its tokenizer
    fingerprint: str
    shapes: DraftShapes
    device_bytes: int  # of its weights

    @classmethod
    def of(cls, source: CheckpointSource, placement: Placement) -> DraftPlan:
        """Return what the headers say. It lies on the devices of the model that it drafts for."""
        shapes = DraftShapes(source.graph, source.leaves(placement))
        return cls(source.name, source.plan.found.folder, source.fingerprint, shapes, source.added_bytes(placement))

    @property
    def graph(self) -> Graph:
        return self.shapes.graph

    @property
    def positions(self) -> int:
        """The longest text that it can draft for."""
        return self.graph.config.max_position_embeddings

    def check_tokens(self, model: Tokenizer) -> None:
        """Raise ConfigError unless all ids that both models have a token for have the same one.

        Where neither has a tokenizer, ids are taken to mean the same.
        """
        own = Tokenizer.load(self.folder)
        if own.has_text != model.has_text:
            lacks = "the model has one" if model.has_text else "the model has none to compare it with"
            problem = f"has {'a' if own.has_text else 'no'} tokenizer, and {lacks}"
            raise ConfigError("drafts", self.name, problem, "Use a model with the same tokenizer")
        if not own.has_text or own.definition == model.definition:
            return
        for token_id in range(min(own.vocab_size, model.vocab_size)):
            mine, theirs = own.token(token_id), model.token(token_id)
            if mine is not None and theirs is not None and mine != theirs:
                problem = (
                    f"has another tokenizer: token {token_id} is {mine[:_FEW]!r} there, and {theirs[:_FEW]!r} here"
                )
                raise ConfigError("drafts", self.name, problem, "Use a model with the same tokenizer")
