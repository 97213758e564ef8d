"""GLM-4 (9B): Llama with biases of q, k and v, a fused gate, and rotated pairs of neighbours in half of each head."""

from __future__ import annotations

from typing import Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import attention_sources, gate_up_role, manifest_of, module, norm_sources
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Source, one
from rekindle._src.models.roles import row


def config(keys: Keys) -> ModelConfig:
    return decoder(keys, **glm_fields(keys))


def glm_fields(keys: Keys) -> dict[str, Any]:
    """Return the fields that GLM-4's two families read alike."""
    head_dim = keys.size("head_dim")
    return {
        "head_dim": head_dim,
        "eps": 0.00000015625,
        "rope": keys.rope(head_dim, partial=True, part=0.5, interleaved=True),
        "qkv_bias": keys.get("attention_bias", True),
    }


def fused_mlp_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, inner = f"model.layers.{layer}.mlp", config.intermediate_size
    return {
        "mlp.gate_up.weight": one(f"{prefix}.gate_up_proj.weight", 2 * inner, role=gate_up_role(inner)),
        "mlp.down.weight": one(f"{prefix}.down_proj.weight", config.hidden_size, role=row(inner)),
    }


manifest = manifest_of(attention_sources, norm_sources, fused_mlp_sources)
FAMILY = Family("GlmForCausalLM", config, module, manifest)
