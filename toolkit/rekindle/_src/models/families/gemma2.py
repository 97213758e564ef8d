"""Gemma 2: norms before and after each half of a block, soft caps, a sliding window in every other layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.llama import Block, Llama, attention_sources, blocks, mlp_sources, outer_sources
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.nn.layers import Attend, RopeTables
from rekindle._src.models.nn.linear import RMSNorm
from rekindle._src.models.precision import Precision


def config(keys: Keys) -> ModelConfig:
    head_dim = keys.size("head_dim")
    spec = AttentionSpec(
        scale=keys.get("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=keys.nullable("attn_logit_softcapping", 50.0),
        rope=keys.rope(head_dim),
    )
    sliding = dataclasses.replace(spec, sliding_window=keys.window(4096))
    slides = keys.layer_types([layer % 2 == 0 for layer in range(keys.size("num_hidden_layers"))])
    return decoder(
        keys,
        attention=tuple(sliding if slide else spec for slide in slides),
        final_soft_cap=keys.nullable("final_logit_softcapping", 30.0),
        **gemma_fields(keys, head_dim),
    )


def gemma_fields(keys: Keys, head_dim: int) -> dict[str, Any]:
    """Return the fields that Gemma 2 and Gemma 3 read alike."""
    keys.only("use_bidirectional_attention", False)
    bias = keys.get("attention_bias", False)
    return {
        "head_dim": head_dim,
        "tie": True,
        "activation": keys.activation("hidden_activation", "gelu_pytorch_tanh"),
        "embed_scale": keys.size("hidden_size") ** 0.5,
        "qkv_bias": bias,
        "o_bias": bias,
    }


class SandwichBlock(Block):
    """A block with norms before and after attention, and before and after the MLP."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__(config, layer, precision)
        self.attention_out_norm = RMSNorm(config.hidden_size, config.norm_eps, precision)
        self.mlp_out_norm = RMSNorm(config.hidden_size, config.norm_eps, precision)

    def __call__(self, x: jax.Array, tables: RopeTables, attend: Attend) -> jax.Array:
        with jax.named_scope("attention"):
            x = x + self.attention_out_norm(self.attention(x, tables, attend, norm=self.attention_norm))
        with jax.named_scope("mlp"):
            return x + self.mlp_out_norm(self.mlp(x, norm=self.mlp_norm))


class Gemma2(Llama):
    block = SandwichBlock


def manifest(config: ModelConfig) -> Manifest:
    # Gemma checkpoints store norm weights minus one.
    return Manifest(
        outer_sources(config, add=1.0) | blocks(config, attention_sources, sandwich_norm_sources, mlp_sources)
    )


def sandwich_norm_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    names = {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
    return {
        f"{module}.weight": one(f"model.layers.{layer}.{tensor}.weight", config.hidden_size, add=1.0)
        for module, tensor in names.items()
    }


FAMILY = Family("Gemma2ForCausalLM", config, Gemma2, manifest)
