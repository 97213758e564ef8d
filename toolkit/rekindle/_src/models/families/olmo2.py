"""OLMo 2: norms only after attention and after the MLP, and norms over all heads of q and of k together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import attention_sources, manifest_of, mlp_sources, norms_of
from rekindle._src.models.family import Family, GgufForm, decoder_of
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Source, one
from rekindle._src.models.roles import column, heads

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    return decoder(keys, kv_heads_implied=True, eps=1e-5, attention_bias=keys.get("attention_bias", False))


module = decoder_of("PostNormBlock")


def wide_norm_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix = f"model.layers.{layer}.self_attn"
    q, k, _ = heads(config.num_heads, config.num_kv_heads, config.head_dim)
    return {
        "attention.q_norm.weight": one(f"{prefix}.q_norm.weight", q.size, role=column(q)),
        "attention.k_norm.weight": one(f"{prefix}.k_norm.weight", k.size, role=column(k)),
    }


post_norm_sources = norms_of(attention_norm="post_attention_layernorm", mlp_norm="post_feedforward_layernorm")


manifest = manifest_of(attention_sources, wide_norm_sources, post_norm_sources, mlp_sources)


def gguf_variant(model: GgufModel) -> str | None:
    """Return OLMo 3 for a file with windows: llama.cpp has one name for both."""
    return "olmo3" if model.integer("attention.sliding_window", 0) else None


POST_NORMED = {"post_attention_layernorm": "post_attention_norm"}
GGUF = GgufForm(architecture="olmo2", variant=gguf_variant, names=POST_NORMED)
FAMILY = Family("Olmo2ForCausalLM", config, module, manifest, gguf=GGUF)
