"""A head that drafts a block of tokens at once (DFlash), from the inputs of some of its model's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.nn.forward import Attend, ForwardPass, RopeTables
from rekindle._src.models.nn.linear import Linear, RMSNorm
from rekindle._src.models.precision import Precision


class ContextEntry(NamedTuple):
    """The keys and values that one layer of the head has of a text."""

    k: Array  # [T, K, D]
    v: Array  # [T, K, D]


class BlockHead(nnx.Module):
    """A head with layers that attend to the model's results for a text, and to a block after it.

    The block has the last token of the text, whose keys the model lacks, and masks in place of the tokens after it; one
    pass drafts them all. Keys and values of the text are made of the inputs of some of the model's layers, and of
    nothing else: they are computed once. Embedding and logits are the model's.

    T tokens, E hidden size, F numbers that it reads of a token, K kv heads, D head dim.
    """

    def __init__(self, config: ModelConfig, precision: Precision, block: Callable[..., Any]) -> None:
        E, eps = config.hidden_size, config.norm_eps
        self.config = config
        self.join = Linear(E, len(config.reads) * E, precision)
        self.context_norm = RMSNorm(E, eps, precision)
        self.layers = nnx.List([block(config, layer, precision) for layer in range(config.num_layers)])
        self.norm = RMSNorm(E, eps, precision)

    def context(self, read: Array, positions: Array, lengths: Array | None) -> list[ContextEntry]:
        """Compute each layer's keys and values of tokens at `positions` [T], from the inputs `read` [T, F]."""
        with jax.named_scope("draft_context"):
            x = self.context_norm(self.join(read))
            tables = RopeTables(self.config, positions, lengths)
            return [ContextEntry(*layer.attention.split(x, tables, None)[1:3]) for layer in self.layers]

    def __call__(self, x: Array, positions: Array, attend: Attend) -> Array:
        """Compute hidden states from the embeddings [T, E] of blocks; their logits draft a token each."""
        with jax.named_scope("draft"):
            step = ForwardPass(RopeTables(self.config, positions), attend)
            for number, layer in enumerate(self.layers):
                x = layer(x, step.of(number))
            normed: Array = self.norm(x)
            return normed
