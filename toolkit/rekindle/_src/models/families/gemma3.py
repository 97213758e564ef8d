"""Gemma 3 (text): Gemma 2 with norms over the heads of q and k instead of soft caps, and a local and a global rope."""

from __future__ import annotations

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.gemma2 import SandwichBlock, gemma_fields, sandwich_norm_sources
from rekindle._src.models.families.llama import (
    Llama,
    attention_sources,
    blocks,
    mlp_sources,
    outer_sources,
    qk_norm_sources,
)
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Manifest, Source
from rekindle._src.models.nn.layers import Attention
from rekindle._src.models.precision import Precision


def config(keys: Keys) -> ModelConfig:
    keys.only("attn_logit_softcapping")
    head_dim = keys.size("head_dim")
    scale = keys.get("query_pre_attn_scalar", 256) ** -0.5
    everywhere = AttentionSpec(scale=scale, rope=keys.rope(head_dim, theta=1_000_000.0, layer_type="full_attention"))
    nearby = AttentionSpec(
        scale=scale,
        sliding_window=keys.window(4096),
        rope=keys.rope(head_dim, layer_type="sliding_attention"),
    )
    pattern = keys.size("sliding_window_pattern", 6)
    slides = keys.layer_types([(layer + 1) % pattern != 0 for layer in range(keys.size("num_hidden_layers"))])
    return decoder(
        keys,
        attention=tuple(nearby if slide else everywhere for slide in slides),
        final_soft_cap=keys.get("final_logit_softcapping"),
        **gemma_fields(keys, head_dim),
    )


class QkNormSandwichBlock(SandwichBlock):
    def make_attention(self, config: ModelConfig, layer: int, precision: Precision) -> Attention:
        return Attention(config, layer, precision, qk_norm=True)


class Gemma3(Llama):
    block = QkNormSandwichBlock


def manifest(config: ModelConfig) -> Manifest:
    def qk_norms(config: ModelConfig, layer: int) -> dict[str, Source]:
        return qk_norm_sources(config, layer, add=1.0)

    pieces = (attention_sources, qk_norms, sandwich_norm_sources, mlp_sources)
    return Manifest(outer_sources(config, add=1.0) | blocks(config, *pieces))


FAMILY = Family("Gemma3ForCausalLM", config, Gemma3, manifest)
