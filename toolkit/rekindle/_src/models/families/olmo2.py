"""OLMo 2: norms only after attention and after the MLP, and norms over all heads of q and of k together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import attention_sources, blocks, mlp_sources, outer_sources
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.roles import column, heads

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel
    from rekindle._src.models.precision import Precision


def config(keys: Keys) -> ModelConfig:
    bias = keys.get("attention_bias", False)
    return decoder(keys, kv_heads_implied=True, eps=1e-5, qkv_bias=bias, o_bias=bias)


def module(config: ModelConfig, precision: Precision) -> Any:
    from rekindle._src.models.nn.decoders import Decoder, PostNormBlock

    return Decoder(config, precision, PostNormBlock)


def wide_norm_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix = f"model.layers.{layer}.self_attn"
    q, k, _ = heads(config.num_heads, config.num_kv_heads, config.head_dim)
    return {
        "attention.q_norm.weight": one(f"{prefix}.q_norm.weight", q.size, role=column(q)),
        "attention.k_norm.weight": one(f"{prefix}.k_norm.weight", k.size, role=column(k)),
    }


def post_norm_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, E = f"model.layers.{layer}", config.hidden_size
    return {
        "attention_norm.weight": one(f"{prefix}.post_attention_layernorm.weight", E),
        "mlp_norm.weight": one(f"{prefix}.post_feedforward_layernorm.weight", E),
    }


def manifest(config: ModelConfig) -> Manifest:
    pieces = (attention_sources, wide_norm_sources, post_norm_sources, mlp_sources)
    return Manifest(outer_sources(config) | blocks(config, *pieces))


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | model.rope()


def gguf_variant(model: GgufModel) -> str | None:
    """Return OLMo 3 for a file with windows: llama.cpp has one name for both."""
    return "olmo3" if model.integer("attention.sliding_window", 0) else None


POST_NORMED = {"post_attention_layernorm": "post_attention_norm"}
GGUF = GgufForm(architecture="olmo2", read=read_gguf, variant=gguf_variant, names=POST_NORMED)
FAMILY = Family("Olmo2ForCausalLM", config, module, manifest, gguf=GGUF)
