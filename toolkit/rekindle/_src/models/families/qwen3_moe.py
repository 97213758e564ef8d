"""Qwen3-MoE: Qwen3 with experts in some or all layers."""

from __future__ import annotations

from rekindle._src.models.config import ModelConfig, MoeSpec
from rekindle._src.models.families.llama import (
    Llama,
    attention_sources,
    blocks,
    norm_sources,
    outer_sources,
    qk_norm_sources,
)
from rekindle._src.models.families.mixtral import SparseBlock, expert_sources
from rekindle._src.models.families.qwen3 import QkNormBlock
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Manifest, Source


def config(keys: Keys) -> ModelConfig:
    spec = MoeSpec(
        num_experts=keys.size("num_experts"),
        top_k=keys.size("num_experts_per_tok"),
        intermediate_size=keys.size("moe_intermediate_size"),
        normalize=keys.get("norm_topk_prob", False),
    )
    dense, step = keys.get("mlp_only_layers", []), keys.size("decoder_sparse_step", 1)
    bias = keys.get("attention_bias", False)
    return decoder(
        keys,
        window=keys.window(4096) if keys.get("use_sliding_window", False) else None,
        qkv_bias=bias,
        o_bias=bias,
        moe=tuple(
            spec if layer not in dense and (layer + 1) % step == 0 else None
            for layer in range(keys.size("num_hidden_layers"))
        ),
    )


class QkNormSparseBlock(QkNormBlock, SparseBlock):
    pass


class Qwen3Moe(Llama):
    block = QkNormSparseBlock


def manifest(config: ModelConfig) -> Manifest:
    def experts(config: ModelConfig, layer: int) -> dict[str, Source]:
        prefix = f"model.layers.{layer}.mlp"
        names = ("gate_proj", "up_proj", "down_proj")
        return expert_sources(config, layer, f"{prefix}.gate", f"{prefix}.experts", names)

    pieces = (attention_sources, qk_norm_sources, norm_sources, experts)
    return Manifest(outer_sources(config) | blocks(config, *pieces))


FAMILY = Family("Qwen3MoeForCausalLM", config, Qwen3Moe, manifest, aliases={"num_experts": "num_local_experts"})
