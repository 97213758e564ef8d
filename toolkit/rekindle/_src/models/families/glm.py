"""GLM-4 (9B): Llama with biases of q, k and v, a fused gate, and rotated pairs of neighbours in half of each head."""

from __future__ import annotations

import dataclasses
from typing import Any

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.llama import (
    attention_sources,
    blocks,
    gate_up_role,
    module,
    norm_sources,
    outer_sources,
)
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.roles import row


def config(keys: Keys) -> ModelConfig:
    return decoder(keys, **glm_fields(keys))


def glm_fields(keys: Keys) -> dict[str, Any]:
    """Return the fields that GLM-4's two families read alike."""
    head_dim = keys.size("head_dim")
    rope = dataclasses.replace(keys.rope(head_dim, partial=True, part=0.5), interleaved=True)
    spec = AttentionSpec(scale=head_dim**-0.5, rope=rope)
    return {
        "head_dim": head_dim,
        "eps": 0.00000015625,
        "attention": (spec,) * keys.size("num_hidden_layers"),
        "qkv_bias": keys.get("attention_bias", True),
    }


def fused_mlp_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, inner = f"model.layers.{layer}.mlp", config.intermediate_size
    return {
        "mlp.gate_up.weight": one(f"{prefix}.gate_up_proj.weight", 2 * inner, role=gate_up_role(inner)),
        "mlp.down.weight": one(f"{prefix}.down_proj.weight", config.hidden_size, role=row(inner)),
    }


def manifest(config: ModelConfig) -> Manifest:
    pieces = (attention_sources, norm_sources, fused_mlp_sources)
    return Manifest(outer_sources(config) | blocks(config, *pieces))


FAMILY = Family("GlmForCausalLM", config, module, manifest)
