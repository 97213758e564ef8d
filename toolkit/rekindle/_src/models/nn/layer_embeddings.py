"""Layers with an embedding of their own for each token, attention whose values are normed, and experts beside an MLP.

T tokens, E hidden size, L layers, P size of a layer's embedding, H query heads, K kv heads, D head size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.nn.decoders import Decoder, SandwichBlock
from rekindle._src.models.nn.layers import Attend, Attention, GatedMlp, RopeTables
from rekindle._src.models.nn.linear import Embedding, Linear, RMSNorm, norm_rows, parameter
from rekindle._src.models.nn.moe import ScaledExperts
from rekindle._src.models.precision import Precision
from rekindle_kernels import gated


class NormedValuesAttention(Attention):
    """Attention with norms over each head of q and k, and one without weights over each head of v.

    A layer may attend to the pages of another: it has queries alone. Values may be made by the projection of the keys.
    """

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__(config, layer, precision, qk_norm=True)
        H, K, D = self.heads, self.kv_heads, self.head_dim
        self.shares = config.source(layer) != layer
        self.keys_as_values = config.attention[layer].keys_as_values
        self.kv_heads = K = 0 if self.shares else K
        rows = H + (K if self.keys_as_values else 2 * K)
        self.qkv = Linear(rows * D, config.hidden_size, precision, bias=config.qkv_bias)
        self.qk_norm = RMSNorm((H + K, D), config.norm_eps, precision)
        self.eps = config.norm_eps

    def project(self, x: jax.Array, norm: RMSNorm | None) -> tuple[jax.Array, jax.Array | None]:
        qkv = self.qkv(x, norm=norm).reshape(x.shape[0], -1, self.head_dim)
        return jnp.concatenate([qkv, qkv[:, self.heads :]], axis=1) if self.keys_as_values else qkv, None

    def attended(self, attend: Attend, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if self.shares:
            return attend(self.layer, q, None, None)
        return attend(self.layer, q, k, norm_rows(v, None, self.eps, self.implementation))


class LayerEmbeddingBlock(SandwichBlock):
    """A sandwich block, then the layer's embedding of the token behind a gate, then a factor for all of it.

    With experts, they and the MLP read the same input, each behind norms of its own, and their results are summed.
    """

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__(config, layer, precision)
        E, size, spec = config.hidden_size, config.layer_embedding, config.moe[layer] if config.moe else None
        self.layer, self.activation = layer, config.activation
        self.scalar = parameter((1,), jnp.float32)
        self.embedding_gate: Any = nnx.data(Linear(size, E, precision) if size else None)
        self.embedding_out: Any = nnx.data(Linear(E, size, precision) if size else None)
        self.embedding_norm: Any = nnx.data(RMSNorm(E, config.norm_eps, precision) if size else None)
        self.experts: Any = nnx.data(None if spec is None else ScaledExperts(config, spec, precision))
        norms = [None if spec is None else RMSNorm(E, config.norm_eps, precision) for _ in range(3)]
        self.dense_out_norm: Any = nnx.data(norms[0])
        self.experts_norm: Any = nnx.data(norms[1])
        self.experts_out_norm: Any = nnx.data(norms[2])

    def make_attention(self, config: ModelConfig, layer: int, precision: Precision) -> Attention:
        return NormedValuesAttention(config, layer, precision)

    def make_mlp(self, config: ModelConfig, layer: int, precision: Precision) -> nnx.Module:
        return GatedMlp(dataclasses.replace(config, intermediate_size=config.mlp_size(layer)), precision)

    def __call__(self, x: jax.Array, tables: RopeTables, attend: Attend) -> jax.Array:
        with jax.named_scope("attention"):
            x = self.attention_out_norm.add(self.attention(x, tables, attend, norm=self.attention_norm), x)
        with jax.named_scope("mlp"):
            y = self.mlp(x, norm=self.mlp_norm)
            if self.experts is not None:
                y = self.dense_out_norm(y) + self.experts_out_norm(self.experts(x, norm=self.experts_norm))
            if self.embedding_gate is None:
                return self.mlp_out_norm.add(y, x, self.scalar[...])
            x = self.mlp_out_norm.add(y, x)
        with jax.named_scope("layer_embedding"):
            gate = self.embedding_gate
            own = gated(gate(x), self.activation, tables.own[self.layer], implementation=gate.implementation)
            return self.embedding_norm.add(self.embedding_out(own.astype(x.dtype)), x, self.scalar[...])


class LayerEmbeddingDecoder(Decoder):
    """A decoder of such blocks. A second table has the embeddings of all layers."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        super().__init__(config, precision, LayerEmbeddingBlock)
        size = config.layer_embedding
        self.layer_embed: Any = nnx.data(None)
        if size:
            rows = config.num_layers * size
            self.layer_embed = nnx.data(Embedding(config.vocab_size, rows, precision))
            self.layer_projection = Linear(rows, config.hidden_size, precision)
            self.layer_projection_norm = RMSNorm(size, config.norm_eps, precision)

    def begin(
        self, tokens: jax.Array, positions: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, RopeTables]:
        x, tables = super().begin(tokens, positions, lengths)
        if self.layer_embed is not None:
            with jax.named_scope("layer_embeddings"):
                tables.own = self.embeddings_of_layers(x, tokens)
        return x, tables

    def embeddings_of_layers(self, x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, ...]:
        """Return for each layer its embeddings [T, P] of tokens [T], whose embeddings in the stream are x [T, E]."""
        layers, size = self.config.num_layers, self.config.layer_embedding
        shape = (*tokens.shape, layers, size)
        projected = self.layer_projection(x) * self.config.hidden_size**-0.5
        stored = self.layer_embed(tokens) * size**0.5
        both = self.layer_projection_norm.add(projected.reshape(shape), stored.reshape(shape)) * 2.0**-0.5
        return tuple(both[..., layer, :] for layer in range(layers))
