"""Qwen3.5, 3.6 and 3.8 with experts (text): Qwen3.5 with experts in all layers, and beside them an MLP with a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import blocks, outer_sources
from rekindle._src.models.families.qwen2_moe import mlp_sources
from rekindle._src.models.families.qwen3_5_text import (
    NAMES,
    REASON,
    TENSORS,
    decoder_keys,
    drafts,
    mixer_fields,
    mixer_keys,
    mixer_sources,
    module,
    norm_sources,
    rewritten,
)
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import FusedExperts, Manifest

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    spec = keys.experts(
        normalize=True,
        shared_size=keys.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    moe = (spec,) * keys.size("num_hidden_layers")
    return decoder(keys, moe=moe, intermediate_size=spec.intermediate_size, **mixer_fields(keys))


def manifest(config: ModelConfig) -> Manifest:
    sources = outer_sources(config, add=1.0) | blocks(config, mixer_sources, norm_sources, mlp_sources)
    return Manifest(sources, ignored=drafts(config), fused=FusedExperts())


def read_gguf(model: GgufModel) -> dict[str, Any]:
    inner = model.integer("expert_feed_forward_length")
    return (
        decoder_keys(model, inner)
        | mixer_keys(model)
        | {
            **model.experts(size=None),
            "moe_intermediate_size": inner,
            "shared_expert_intermediate_size": model.integer("expert_shared_feed_forward_length"),
        }
    )


GGUF = GgufForm(
    architecture="qwen35moe", read=read_gguf, names=NAMES, tensors=TENSORS, rewritten=rewritten, reads_only=REASON
)
FAMILY = Family("Qwen3_5MoeForCausalLM", config, module, manifest, gguf=GGUF)
