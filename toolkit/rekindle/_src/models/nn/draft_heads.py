"""Heads that draft tokens from the hidden states of a model: its own, and EAGLE-3's of another checkpoint.

T tokens, N rows, E hidden size, H query heads, K kv heads, D head dim or tokens that can be drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.nn.forward import Attend, ForwardPass, RopeTables
from rekindle._src.models.nn.layers import Attention, GatedMlp
from rekindle._src.models.nn.linear import Embedding, Linear, RMSNorm, head_logits, parameter
from rekindle._src.models.precision import Precision


class DraftEntries(NamedTuple):
    """The results of a draft head for all tokens."""

    x: Array  # [T, E]
    q: Array  # [T, H, D]
    k: Array  # [T, K, D]
    v: Array | None  # None: pages are latent
    gate: Array | None

    def of(self, places: Array) -> tuple[Array, Array, Array | None]:
        """Return x, queries and gates of the tokens at these places."""
        return self.x[places], self.q[places], None if self.gate is None else self.gate[places]


class DraftScores(NamedTuple):
    """The scores of the tokens that a head can draft."""

    logits: Array  # float32 [N, D]
    ids: Array | None = None  # int32 [D]: which tokens of the model they are; None: the first D


Embed = Callable[[Array], Array]  # the model's embedding, of tokens [T]
Logits = Callable[[Array, Array | None], Array]  # of hidden states [N, E], of which so many first rows count
_NOWHERE = ForwardPass(RopeTables.of({}), cast(Attend, None))  # of an MLP, which attends to nothing


class DraftHead(nnx.Module):
    """A head that is part of a model: a norm of the final hidden state and one of the next token's embedding, a matrix
    that joins both, one block with attention, and a norm. Embedding and head are the model's.

    The keys and values of its block depend on the joined vector alone. So they can be kept for all tokens, and the rest
    be computed for those tokens after which one is drafted.
    """

    def __init__(self, config: ModelConfig, precision: Precision, block: Callable[..., Any]) -> None:
        E, eps = config.hidden_size, config.norm_eps
        self.config = config
        self.embedding_norm, self.hidden_norm = RMSNorm(E, eps, precision), RMSNorm(E, eps, precision)
        self.join = Linear(E, 2 * E, precision)
        self.layer = block(config, 0, precision)
        self.norm = RMSNorm(E, eps, precision)

    def state(self, read: Array) -> Array:
        """Return the hidden states to draft from: the model's own."""
        return read

    def entries(
        self, tokens: Array, embed: Embed, hidden: Array, positions: Array, lengths: Array | None
    ) -> DraftEntries:
        """Compute the block's input, its queries and its entries from hidden states [T, E] after the model's final norm
        and the tokens [T] that follow them.
        """
        tables, embedded = RopeTables(self.config, positions, lengths), embed(tokens)
        with jax.named_scope("draft_entries"):
            both = jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-1)
            x = self.join(both)
            return DraftEntries(x, *self.layer.attention.split(x, tables, self.layer.attention_norm))

    def draft(self, x: Array, attended: Array, gate: Array | None) -> Array:
        """Compute the rest of the block and the norm, of the block's input x [N, E] and what was attended to [N, H, D].

        The result [N, E] is what the model's head reads, and the hidden state of a next token to draft."""
        with jax.named_scope("draft"):
            x = self.layer.attention.join(attended, gate, x.dtype, x)
            return self.norm(self.layer.mlp(x, _NOWHERE, x, self.layer.mlp_norm))

    def scores(self, hidden: Array, logits: Logits, count: Array | None) -> DraftScores:
        """Compute the scores of all tokens by the model's `logits`."""
        return DraftScores(logits(hidden, count))


class EagleHead(nnx.Module):
    """An EAGLE-3 head: a matrix that joins the inputs of some layers of the model to a hidden state, and one block.
    Its attention reads the normed embedding of the next token and the normed hidden state, side by side.

    The block's output is the hidden state for the next token to draft, before the final norm. Tokens that it can draft
    may be some of the model's.
    """

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        spec, E, eps = config.eagle, config.hidden_size, config.norm_eps
        assert spec is not None, "the config is that of an EAGLE-3 head"
        self.config, self.precision, self.spec = config, precision, spec
        inputs = spec.inputs * spec.hidden_size
        self.inputs_norm: Any = nnx.data(RMSNorm(inputs, eps, precision) if spec.norm_before_join else None)
        self.join = Linear(E, inputs, precision)
        self.embed: Any = nnx.data(Embedding(config.vocab_size, E, precision) if spec.own_embedding else None)
        self.embedding_norm, self.hidden_norm = RMSNorm(E, eps, precision), RMSNorm(E, eps, precision)
        self.attention = Attention(config, 0, precision, inputs=2 * E)
        self.mlp_norm, self.norm = RMSNorm(E, eps, precision), RMSNorm(E, eps, precision)
        self.mlp = GatedMlp(config, precision)
        self.head: Any = nnx.data(None)
        if spec.own_head:
            self.head = nnx.data(Linear(spec.vocab_size, E, precision, quantize=precision.quantize_embeddings))
            self.head.part = "head"
        # Whole numbers, which are exact below 2^24
        self.tokens: Any = nnx.data(parameter((spec.vocab_size,), jnp.float32) if spec.maps else None)

    def state(self, read: Array) -> Array:
        """Compute the hidden states [T, E] to draft from, given the inputs [T, F] of the model's layers."""
        with jax.named_scope("draft_state"):
            return self.join(read, norm=self.inputs_norm)

    def entries(
        self, tokens: Array, embed: Embed, hidden: Array, positions: Array, lengths: Array | None
    ) -> DraftEntries:
        """Compute the block's residual, its queries and its entries from hidden states [T, E] and the tokens [T] that
        follow them.
        """
        tables = RopeTables(self.config, positions, lengths)
        embedded = (embed if self.embed is None else self.embed)(tokens)
        with jax.named_scope("draft_entries"):
            normed = self.hidden_norm(hidden)
            both = jnp.concatenate([self.embedding_norm(embedded), normed], axis=-1)
            residual = normed if self.spec.norm_before_residual else hidden
            return DraftEntries(residual, *self.attention.split(both, tables, None))

    def draft(self, x: Array, attended: Array, gate: Array | None) -> Array:
        """Compute the block's output [N, E], of its residual x [N, E] and what was attended to [N, H, D]."""
        with jax.named_scope("draft"):
            x = self.attention.join(attended, gate, x.dtype, x)
            return self.mlp(x, _NOWHERE, x, self.mlp_norm)

    def scores(self, hidden: Array, logits: Logits, count: Array | None) -> DraftScores:
        """Compute the scores of the tokens that it can draft, by its own head or by the model's `logits`."""
        normed = self.norm(hidden)
        if self.head is None:
            return DraftScores(logits(normed, count))
        own = head_logits(normed, self.head, self.precision, count=count)
        if self.tokens is None:
            return DraftScores(own)
        ids = self.tokens[...].astype(jnp.int32)
        return DraftScores(own, ids if self.spec.absolute else ids + jax.lax.iota(jnp.int32, len(ids)))
