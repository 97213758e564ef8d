"""OLMo 2: norms only after attention and after the MLP, and norms over all heads of q and of k together."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import Block, Llama, attention_sources, blocks, mlp_sources, outer_sources
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.nn.layers import Attend, Attention, RopeTables
from rekindle._src.models.nn.linear import RMSNorm
from rekindle._src.models.nn.shards import Shards
from rekindle._src.models.precision import Precision
from rekindle._src.models.roles import column, heads


def config(keys: Keys) -> ModelConfig:
    bias = keys.get("attention_bias", False)
    return decoder(keys, kv_heads_implied=True, eps=1e-5, qkv_bias=bias, o_bias=bias)


class WideNormAttention(Attention):
    """Attention with one norm over all heads of q together and one over those of k."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__(config, layer, precision)
        self.q_norm = RMSNorm(config.num_heads * config.head_dim, config.norm_eps, precision)
        self.k_norm = RMSNorm(config.num_kv_heads * config.head_dim, config.norm_eps, precision)
        self.shards = precision.shards

    def normed(self, qkv: jax.Array) -> jax.Array:
        qk = qkv[..., : self.heads + self.kv_heads, :]
        wide = qk.reshape(*qk.shape[:-2], -1)
        split = self.heads * self.head_dim
        if self.shards is not None:
            return self._normed_over_devices(wide, split, self.shards).reshape(qk.shape)
        parts = [self.q_norm(wide[..., :split]), self.k_norm(wide[..., split:])]
        return jnp.concatenate(parts, axis=-1).reshape(qk.shape)

    def _normed_over_devices(self, wide: jax.Array, split: int, shards: Shards) -> jax.Array:
        """Norm heads that are divided: all devices have equally many, so the mean of their means is the mean."""
        parts = [part.astype(jnp.float32) for part in (wide[..., :split], wide[..., split:])]
        means = shards.mean(jnp.stack([jnp.mean(part * part, axis=-1) for part in parts]))
        outputs = [
            part * jax.lax.rsqrt(mean + norm.eps)[..., None] * norm.weight[...]
            for part, mean, norm in zip(parts, means, (self.q_norm, self.k_norm), strict=True)
        ]
        return jnp.concatenate(outputs, axis=-1).astype(wide.dtype)


class PostNormBlock(Block):
    """A block that norms the output of attention and that of the MLP."""

    def make_attention(self, config: ModelConfig, layer: int, precision: Precision) -> Attention:
        return WideNormAttention(config, layer, precision)

    def __call__(self, x: jax.Array, tables: RopeTables, attend: Attend) -> jax.Array:
        with jax.named_scope("attention"):
            x = x + self.attention_norm(self.attention(x, tables, attend))
        with jax.named_scope("mlp"):
            return x + self.mlp_norm(self.mlp(x))


class Olmo2(Llama):
    block = PostNormBlock


def manifest(config: ModelConfig) -> Manifest:
    def norms(config: ModelConfig, layer: int) -> dict[str, Source]:
        prefix, D = f"model.layers.{layer}", config.head_dim
        q, k, _ = heads(config.num_heads, config.num_kv_heads, D)
        return {
            "attention.q_norm.weight": one(f"{prefix}.self_attn.q_norm.weight", q.size, role=column(q)),
            "attention.k_norm.weight": one(f"{prefix}.self_attn.k_norm.weight", k.size, role=column(k)),
            "attention_norm.weight": one(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
            "mlp_norm.weight": one(f"{prefix}.post_feedforward_layernorm.weight", config.hidden_size),
        }

    return Manifest(outer_sources(config) | blocks(config, attention_sources, norms, mlp_sources))


FAMILY = Family("Olmo2ForCausalLM", config, Olmo2, manifest)
