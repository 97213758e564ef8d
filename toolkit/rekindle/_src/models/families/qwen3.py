"""Qwen3: Llama with a norm over each head of q and k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import (
    attention_sources,
    manifest_of,
    mlp_sources,
    norm_sources,
    qk_norm_sources,
)
from rekindle._src.models.families.qwen2 import sliding
from rekindle._src.models.family import Family, GgufForm, decoder_of
from rekindle._src.models.hf_config import Keys, decoder

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    window, slides = sliding(keys)
    bias = keys.get("attention_bias", False)
    head_dim = keys.size("head_dim")
    return decoder(keys, head_dim=head_dim, window=window, slides=slides.__getitem__, attention_bias=bias)


module = decoder_of("QkNormBlock")
manifest = manifest_of(attention_sources, qk_norm_sources, norm_sources, mlp_sources)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | {"attention_bias": model.has("blk.0.attn_q.bias")} | model.rope()


GGUF = GgufForm(architecture="qwen3", read=read_gguf)
FAMILY = Family("Qwen3ForCausalLM", config, module, manifest, gguf=GGUF)
