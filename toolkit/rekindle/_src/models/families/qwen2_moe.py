"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts in some or all layers, and beside them an MLP with a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import attention_sources, manifest_of, norm_sources
from rekindle._src.models.families.mixtral import shared_sources, usual_expert_sources
from rekindle._src.models.families.qwen2 import sliding
from rekindle._src.models.families.qwen3_moe import sparse_layers
from rekindle._src.models.family import Family, GgufForm, decoder_of
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Source

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    spec = keys.experts(
        normalize=keys.get("norm_topk_prob", False),
        shared_size=keys.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    window, slides = sliding(keys)
    bias = keys.get("qkv_bias", True)
    moe = tuple(spec if sparse else None for sparse in sparse_layers(keys))
    return decoder(keys, window=window, slides=slides.__getitem__, qkv_bias=bias, moe=moe)


module = decoder_of("SparseBlock")


def mlp_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix = f"model.layers.{layer}.mlp"
    shared = shared_sources(config, layer, f"{prefix}.shared_expert", f"{prefix}.shared_expert_gate")
    return usual_expert_sources(config, layer) | shared


manifest = manifest_of(attention_sources, norm_sources, mlp_sources)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    keys = {
        **model.experts(),
        "shared_expert_intermediate_size": model.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,  # known by the architecture
    }
    return model.decoder() | keys | model.rope()


GGUF = GgufForm(architecture="qwen2moe", read=read_gguf, reads_only="rekindle does not write shared experts")
FAMILY = Family("Qwen2MoeForCausalLM", config, module, manifest, gguf=GGUF)
