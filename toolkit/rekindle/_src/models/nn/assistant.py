"""Assistants: models that draft tokens for another one, and read its embeddings, hidden states and pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.nn.forward import Attend, ForwardPass, RopeTables
from rekindle._src.models.nn.linear import Embedding, Linear, RMSNorm, head_logits, parameter
from rekindle._src.models.precision import Precision


class AssistantHidden(NamedTuple):
    """The results of an assistant for each row."""

    own: Array  # [N, E]: what its logits are made of
    next: Array  # [N, B]: what it reads for the token after the one that it drafts


class Assistant(nnx.Module):
    """A model that drafts for another one: it reads that one's hidden states and embeddings, and attends to its pages.

    Its layers have queries alone. All tokens that follow each other are drafted at one position, that of the last token
    of the text, and attend to the same keys. The vocabulary may be in clusters: only tokens of the clusters whose
    centroids are the nearest have logits of their own, and all others one that is less.

    N rows, E size of its own hidden states, B of the other model's, V vocabulary, C clusters.
    """

    def __init__(self, config: ModelConfig, precision: Precision, block: Callable[..., nnx.Module]) -> None:
        spec, E, V = config.assists, config.hidden_size, config.vocab_size
        assert spec is not None, "the config is that of an assistant"
        self.config, self.precision, self.spec = config, precision, spec
        self.embed = Embedding(V, E, precision)
        self.layers = nnx.List([block(config, layer, precision) for layer in range(config.num_layers)])
        self.norm = RMSNorm(E, config.norm_eps, precision)
        self.inputs = Linear(E, 2 * spec.hidden_size, precision)
        self.outputs = Linear(spec.hidden_size, E, precision)
        self.centroids: Any = nnx.data(Linear(spec.centroids, E, precision) if spec.centroids else None)
        # The tokens of each cluster, one after the other: whole numbers, which are exact below 2^24.
        self.clusters: Any = nnx.data(parameter((V,), jnp.float32) if spec.centroids else None)

    def __call__(self, embedded: Array, hidden: Array, positions: Array, attend: Attend) -> AssistantHidden:
        """Compute the hidden states after tokens, of their embeddings [N, B] in the other model and of the hidden
        states [N, B] before them."""
        x = self.inputs(jnp.concatenate([embedded, hidden.astype(embedded.dtype)], axis=-1))
        step = ForwardPass(RopeTables(self.config, positions), attend)
        for number, layer in enumerate(self.layers):
            x = layer(x, step.of(number))
        own = self.norm(x)
        return AssistantHidden(own, self.outputs(own))

    def logits(self, own: Array, count: Array | None = None) -> Array:
        """Compute own [N, E] → float32 [N, V]; rows after the first `count` are undefined."""
        if self.centroids is None:
            return head_logits(own, self.embed, self.precision, count=count)
        rows, V, C = own.shape[0], self.config.vocab_size, self.spec.centroids
        near = jax.lax.top_k(self.centroids(own).astype(jnp.float32), self.spec.nearest)[1]
        tokens = self.clusters[...].astype(jnp.int32).reshape(C, V // C)[near].reshape(rows, -1)
        matrices = self.embed(tokens.reshape(-1)).reshape(*tokens.shape, -1)
        logits = jnp.einsum("ne,nte->nt", own, matrices.astype(own.dtype), preferred_element_type=jnp.float32)
        others = jnp.min(logits, axis=1, keepdims=True) - 1.0
        return jnp.broadcast_to(others, (rows, V)).at[jnp.arange(rows)[:, None], tokens].set(logits)
