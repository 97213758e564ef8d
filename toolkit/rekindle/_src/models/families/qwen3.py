"""Qwen3: Llama with a norm over each head of q and k."""

from __future__ import annotations

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import (
    Block,
    Llama,
    attention_sources,
    blocks,
    mlp_sources,
    norm_sources,
    outer_sources,
    qk_norm_sources,
)
from rekindle._src.models.families.qwen2 import sliding
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Manifest
from rekindle._src.models.nn.layers import Attention
from rekindle._src.models.precision import Precision


def config(keys: Keys) -> ModelConfig:
    window, slides = sliding(keys)
    bias = keys.get("attention_bias", False)
    head_dim = keys.size("head_dim")
    return decoder(keys, head_dim=head_dim, window=window, slides=slides.__getitem__, qkv_bias=bias, o_bias=bias)


class QkNormBlock(Block):
    def make_attention(self, config: ModelConfig, layer: int, precision: Precision) -> Attention:
        return Attention(config, layer, precision, qk_norm=True)


class Qwen3(Llama):
    block = QkNormBlock


def manifest(config: ModelConfig) -> Manifest:
    pieces = (attention_sources, qk_norm_sources, norm_sources, mlp_sources)
    return Manifest(outer_sources(config) | blocks(config, *pieces))


FAMILY = Family("Qwen3ForCausalLM", config, Qwen3, manifest)
