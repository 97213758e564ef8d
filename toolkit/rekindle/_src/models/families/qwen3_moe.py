"""Qwen3-MoE: Qwen3 with experts in some or all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig, MoeSpec
from rekindle._src.models.families.llama import (
    attention_sources,
    blocks,
    norm_sources,
    outer_sources,
    qk_norm_sources,
)
from rekindle._src.models.families.mixtral import usual_expert_sources
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Manifest

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel
    from rekindle._src.models.precision import Precision


def config(keys: Keys) -> ModelConfig:
    spec = MoeSpec(
        num_experts=keys.size("num_experts"),
        top_k=keys.size("num_experts_per_tok"),
        intermediate_size=keys.size("moe_intermediate_size"),
        normalize=keys.get("norm_topk_prob", False),
    )
    bias = keys.get("attention_bias", False)
    return decoder(
        keys,
        window=keys.window(4096) if keys.get("use_sliding_window", False) else None,
        qkv_bias=bias,
        o_bias=bias,
        moe=tuple(spec if sparse else None for sparse in sparse_layers(keys)),
    )


def sparse_layers(keys: Keys) -> list[bool]:
    """Return which layers have experts."""
    dense, step = keys.get("mlp_only_layers", []), keys.size("decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(keys.size("num_hidden_layers"))]


def module(config: ModelConfig, precision: Precision) -> Any:
    from rekindle._src.models.nn.decoders import Decoder, QkNormSparseBlock

    return Decoder(config, precision, QkNormSparseBlock)


def manifest(config: ModelConfig) -> Manifest:
    pieces = (attention_sources, qk_norm_sources, norm_sources, usual_expert_sources)
    return Manifest(outer_sources(config) | blocks(config, *pieces))


def read_gguf(model: GgufModel) -> dict[str, Any]:
    experts = {
        "num_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "moe_intermediate_size": model.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # known by the architecture
        "attention_bias": model.has("blk.0.attn_q.bias"),
    }
    return model.decoder() | experts | model.rope()


GGUF = GgufForm(architecture="qwen3moe", read=read_gguf)
ALIASES = {"num_experts": "num_local_experts"}
FAMILY = Family("Qwen3MoeForCausalLM", config, module, manifest, ALIASES, GGUF)
