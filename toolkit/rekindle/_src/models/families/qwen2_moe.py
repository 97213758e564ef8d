"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts in some or all layers, and beside them an MLP with a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig, MoeSpec
from rekindle._src.models.families.llama import attention_sources, blocks, norm_sources, outer_sources
from rekindle._src.models.families.mixtral import shared_sources, usual_expert_sources
from rekindle._src.models.families.qwen2 import sliding
from rekindle._src.models.families.qwen3_moe import sparse_layers
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Manifest, Source

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel
    from rekindle._src.models.precision import Precision


def config(keys: Keys) -> ModelConfig:
    spec = MoeSpec(
        num_experts=keys.size("num_experts"),
        top_k=keys.size("num_experts_per_tok"),
        intermediate_size=keys.size("moe_intermediate_size"),
        normalize=keys.get("norm_topk_prob", False),
        shared_size=keys.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    window, slides = sliding(keys)
    bias = keys.get("qkv_bias", True)
    moe = tuple(spec if sparse else None for sparse in sparse_layers(keys))
    return decoder(keys, window=window, slides=slides.__getitem__, qkv_bias=bias, moe=moe)


def module(config: ModelConfig, precision: Precision) -> Any:
    from rekindle._src.models.nn.decoders import Decoder, SparseBlock

    return Decoder(config, precision, SparseBlock)


def manifest(config: ModelConfig) -> Manifest:
    def experts(config: ModelConfig, layer: int) -> dict[str, Source]:
        prefix = f"model.layers.{layer}.mlp"
        shared = shared_sources(config, layer, f"{prefix}.shared_expert", f"{prefix}.shared_expert_gate")
        return usual_expert_sources(config, layer) | shared

    return Manifest(outer_sources(config) | blocks(config, attention_sources, norm_sources, experts))


def read_gguf(model: GgufModel) -> dict[str, Any]:
    keys = {
        "num_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "moe_intermediate_size": model.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": model.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,  # known by the architecture
    }
    return model.decoder() | keys | model.rope()


GGUF = GgufForm(architecture="qwen2moe", read=read_gguf, reads_only="rekindle does not write shared experts")
FAMILY = Family("Qwen2MoeForCausalLM", config, module, manifest, gguf=GGUF)
