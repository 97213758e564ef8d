"""Heads of EAGLE-3, which read the inputs of some layers of the model: they draft one token after another, as `head`.

Their hidden states are joined of what they read, and they may have an embedding, a head and a vocabulary of their own.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jax import Array

from rekindle._src.drafts.checkpoint import DraftCheckpoint, Target, refuse
from rekindle._src.drafts.entries import FIX, OtherHeadKind, fitted, shapes_in
from rekindle._src.drafts.head import HeadPrograms
from rekindle._src.drafts.kind import DraftKind
from rekindle.errors import CheckpointError


def kind_of(checkpoint: DraftCheckpoint, target: Target) -> DraftKind:
    """Return the drafter of such a head. Raise ConfigError if it was made for another model."""
    own, spec, model = checkpoint.config, checkpoint.config.eagle, target.model
    assert spec is not None, "the checkpoint is an EAGLE-3 head"
    reads = own.reads or (2, model.num_layers // 2, model.num_layers - 3)
    checkpoint = fitted(checkpoint, target, reads, spec.hidden_size)
    if not spec.own_embedding and own.hidden_size != model.hidden_size:
        problem = f"has no embedding, and hidden states of {own.hidden_size:,} numbers where this model's have"
        refuse(checkpoint.name, f"{problem} {model.hidden_size:,}", FIX)
    if own.vocab_size != model.vocab_size:
        problem = f"has a vocabulary of {own.vocab_size:,} tokens, and this model one of {model.vocab_size:,}"
        refuse(checkpoint.name, problem, FIX)
    shapes = shapes_in(checkpoint.plan.graph, target, checkpoint.shapes.leaves, reads=reads)
    return EagleKind("eagle3", "the EAGLE-3 head", checkpoint, HeadPrograms(shapes, shapes.graph.config))


@dataclasses.dataclass(frozen=True, eq=False)
class EagleKind(OtherHeadKind):
    """The drafter that is a head of EAGLE-3."""

    def load(self) -> tuple[Array, ...]:
        """Read its leaves. Raise CheckpointError unless all tokens that it can draft are in the vocabulary."""
        head = self.checkpoint.load()
        by_path, spec = dict(zip(head.graph.paths, head.leaves, strict=True)), head.config.eagle
        if spec is None or "tokens" not in by_path:
            return head.leaves
        ids = np.asarray(by_path["tokens"]) + (0 if spec.absolute else np.arange(spec.vocab_size))
        if ids.min() < 0 or ids.max() >= head.config.vocab_size or len(np.unique(ids)) != len(ids):
            raise CheckpointError(
                f"the tensor d2t of {self.checkpoint.name} names {ids.min():,.0f} to {ids.max():,.0f}, of a vocabulary "
                f"of {head.config.vocab_size:,} tokens, or one of them twice. Download it again."
            )
        return head.leaves
