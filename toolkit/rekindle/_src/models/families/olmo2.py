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
from rekindle._src.models.precision import Precision


def config(keys: Keys) -> ModelConfig:
    bias = keys.get("attention_bias", False)
    return decoder(keys, kv_heads_implied=True, eps=1e-5, qkv_bias=bias, o_bias=bias)


class WideNormAttention(Attention):
    """Attention with one norm over all heads of q together and one over those of k."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__(config, layer, precision)
        self.q_norm = RMSNorm(config.num_heads * config.head_dim, config.norm_eps, precision)
        self.k_norm = RMSNorm(config.num_kv_heads * config.head_dim, config.norm_eps, precision)

    def normed(self, qkv: jax.Array) -> jax.Array:
        qk = qkv[..., : self.heads + self.kv_heads, :]
        wide = qk.reshape(*qk.shape[:-2], -1)
        split = self.heads * self.head_dim
        parts = [self.q_norm(wide[..., :split]), self.k_norm(wide[..., split:])]
        return jnp.concatenate(parts, axis=-1).reshape(qk.shape)


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
        theirs, D = f"model.layers.{layer}", config.head_dim
        return {
            "attention.q_norm.weight": one(f"{theirs}.self_attn.q_norm.weight", config.num_heads * D),
            "attention.k_norm.weight": one(f"{theirs}.self_attn.k_norm.weight", config.num_kv_heads * D),
            "attention_norm.weight": one(f"{theirs}.post_attention_layernorm.weight", config.hidden_size),
            "mlp_norm.weight": one(f"{theirs}.post_feedforward_layernorm.weight", config.hidden_size),
        }

    return Manifest(outer_sources(config) | blocks(config, attention_sources, norms, mlp_sources))


FAMILY = Family("Olmo2ForCausalLM", config, Olmo2, manifest)
