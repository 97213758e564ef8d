"""Qwen3: Llama with a norm over each head of q and k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import (
    attention_sources,
    blocks,
    mlp_sources,
    norm_sources,
    outer_sources,
    qk_norm_sources,
)
from rekindle._src.models.families.qwen2 import sliding
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Manifest

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel
    from rekindle._src.models.precision import Precision


def config(keys: Keys) -> ModelConfig:
    window, slides = sliding(keys)
    bias = keys.get("attention_bias", False)
    head_dim = keys.size("head_dim")
    return decoder(keys, head_dim=head_dim, window=window, slides=slides.__getitem__, qkv_bias=bias, o_bias=bias)


def module(config: ModelConfig, precision: Precision) -> Any:
    from rekindle._src.models.nn.decoders import Decoder, QkNormBlock

    return Decoder(config, precision, QkNormBlock)


def manifest(config: ModelConfig) -> Manifest:
    pieces = (attention_sources, qk_norm_sources, norm_sources, mlp_sources)
    return Manifest(outer_sources(config) | blocks(config, *pieces))


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | {"attention_bias": model.has("blk.0.attn_q.bias")} | model.rope()


GGUF = GgufForm(architecture="qwen3", read=read_gguf)
FAMILY = Family("Qwen3ForCausalLM", config, module, manifest, gguf=GGUF)
