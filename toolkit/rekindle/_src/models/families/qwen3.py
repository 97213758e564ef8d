"""Qwen3: Llama with a norm over each head of q and k. Qwen3-MoE has experts in some or all layers."""

from __future__ import annotations

from typing import Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families import llama
from rekindle._src.models.families.qwen2 import sliding, sparse_layers
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of, with_biases
from rekindle._src.models.hf_config import ConfigKeys, decoder


def config(keys: ConfigKeys) -> ModelConfig:
    window, slides = sliding(keys)
    bias = keys.get("attention_bias", False)
    head_dim = keys.size("head_dim")
    rope = keys.rope(head_dim, sections=(24, 20, 20))  # in models that take pictures
    return decoder(keys, head_dim=head_dim, rope=rope, window=window, slides=slides.__getitem__, attention_bias=bias)


def moe_config(keys: ConfigKeys) -> ModelConfig:
    spec = keys.experts(normalize=keys.get("norm_topk_prob", False))
    window = keys.window(4096) if keys.get("use_sliding_window", False) else None
    moe = tuple(spec if sparse else None for sparse in sparse_layers(keys))
    return decoder(keys, window=window, attention_bias=keys.get("attention_bias", False), moe=moe)


module, moe_module = decoder_of("QkNormBlock"), decoder_of("QkNormSparseBlock")
manifest = llama.manifest_of(llama.attention_sources, llama.qk_norm_sources, llama.norm_sources, llama.mlp_sources)
moe_manifest = llama.manifest_of(
    llama.attention_sources, llama.qk_norm_sources, llama.norm_sources, llama.usual_expert_sources
)
read_gguf = with_biases(attention_bias="attn_q")


def read_moe_gguf(model: GgufModel) -> dict[str, Any]:
    return read_gguf(model) | model.experts() | {"norm_topk_prob": True}  # known by the architecture


GGUF = GgufForm(architecture="qwen3", others=("qwen3vl",), read=read_gguf)
MOE_GGUF = GgufForm(architecture="qwen3moe", read=read_moe_gguf)
ALIASES = {"num_experts": "num_local_experts"}
FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", config, module, manifest, gguf=GGUF),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", moe_config, moe_module, moe_manifest, ALIASES, MOE_GGUF),
}
