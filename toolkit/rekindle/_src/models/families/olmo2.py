"""OLMo 2: norms only after attention and after the MLP, and norms over all heads of q and of k together.

OLMo 3 has a sliding window in three of four layers. OLMoE is Llama with these norms of q and k, and experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families import llama
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Source, one
from rekindle._src.models.roles import column, heads


def config(keys: ConfigKeys, **options: Any) -> ModelConfig:
    bias = keys.get("attention_bias", False)
    return decoder(keys, kv_heads_implied=True, eps=1e-5, attention_bias=bias, **options)


def config3(keys: ConfigKeys) -> ModelConfig:
    head_dim = keys.head_dim
    by_type = keys.has_rope_per_layer_type()
    full, nearby = (
        AttentionSpec(scale=head_dim**-0.5, rope=keys.rope(head_dim, theta=500_000.0, layer_type=kind))
        for kind in (("full_attention", "sliding_attention") if by_type else (None, None))
    )
    if not by_type:  # older files: the scaling is that of layers that see everything
        plain = ConfigKeys({name: value for name, value in keys.raw.items() if name != "rope_scaling"})
        nearby = dataclasses.replace(nearby, rope=plain.rope(head_dim, theta=500_000.0))
    nearby = dataclasses.replace(nearby, sliding_window=keys.window(4096))
    slides = keys.layer_types([(layer + 1) % 4 != 0 for layer in range(keys.size("num_hidden_layers"))])
    return config(keys, attention=tuple(nearby if slide else full for slide in slides))


def moe_config(keys: ConfigKeys) -> ModelConfig:
    keys.only("clip_qkv")
    spec = keys.experts(size="intermediate_size", normalize=keys.get("norm_topk_prob", False))
    return config(keys, moe=(spec,) * keys.size("num_hidden_layers"))


def wide_norm_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix = f"model.layers.{layer}.self_attn"
    q, k, _ = heads(config.num_heads, config.num_kv_heads, config.head_dim)
    return {
        "attention.q_norm.weight": one(f"{prefix}.q_norm.weight", q.size, role=column(q)),
        "attention.k_norm.weight": one(f"{prefix}.k_norm.weight", k.size, role=column(k)),
    }


post_norm_sources = llama.norms_of(attention_norm="post_attention_layernorm", mlp_norm="post_feedforward_layernorm")
module, moe_module = decoder_of("PostNormBlock"), decoder_of("WideNormSparseBlock")
manifest = llama.manifest_of(llama.attention_sources, wide_norm_sources, post_norm_sources, llama.mlp_sources)
moe_manifest = llama.manifest_of(
    llama.attention_sources, wide_norm_sources, llama.norm_sources, llama.usual_expert_sources
)


def gguf_variant(model: GgufModel) -> str | None:
    """Return OLMo 3 for a file with windows: llama.cpp has one name for both."""
    return "olmo3" if model.window else None


def read_gguf3(model: GgufModel) -> dict[str, Any]:
    window = {"sliding_window": model.integer("attention.sliding_window")}
    return model.decoder() | window | model.sliding_layers() | model.rope()


def read_moe_gguf(model: GgufModel) -> dict[str, Any]:
    keys = model.experts(size=None) | {"norm_topk_prob": False}  # known by the architecture
    return model.decoder() | keys | model.rope()


def windows3(slides: Sequence[bool]) -> dict[str, Any]:
    return {"attention.sliding_window_pattern": list(slides)}


POST_NORMED = {"post_attention_layernorm": "post_attention_norm"}
GGUF = GgufForm(architecture="olmo2", variant=gguf_variant, names=POST_NORMED)
GGUF3 = GgufForm(architecture="olmo2", read=read_gguf3, names=POST_NORMED, windows=windows3, local_rope=True)
MOE_GGUF = GgufForm(
    architecture="olmoe",
    read=read_moe_gguf,
    reads_only="rekindle does not write weights of experts that have another sum",
)
ALIASES = {"num_experts": "num_local_experts"}
FAMILIES = {
    "olmo2": Family("Olmo2ForCausalLM", config, module, manifest, gguf=GGUF),
    "olmo3": Family("Olmo3ForCausalLM", config3, module, manifest, gguf=GGUF3),
    "olmoe": Family("OlmoeForCausalLM", moe_config, moe_module, moe_manifest, ALIASES, MOE_GGUF),
}
