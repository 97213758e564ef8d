"""ERNIE 4.5 (21B-A3B): ERNIE 4.5 with experts from a layer on, chosen with a correction, and an MLP beside them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families import ernie4_5
from rekindle._src.models.families.llama import attention_sources, manifest_of, norm_sources
from rekindle._src.models.families.mixtral import shared_sources, usual_expert_sources
from rekindle._src.models.family import Family, GgufForm, decoder_of
from rekindle._src.models.hf_config import Keys
from rekindle._src.models.loading.manifest import Source, one

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    inner, layers = keys.size("moe_intermediate_size"), keys.size("num_hidden_layers")
    keys.only("use_bias", False)
    spec = keys.experts(
        "moe_num_experts",
        of_token="moe_k",
        normalize=True,
        correction=True,
        shared_size=inner * keys.get("moe_num_shared_experts", 2),
    )
    first, last, step = (
        keys.get("moe_layer_start_index", 1),
        keys.get("moe_layer_end_index", -1),
        keys.size("moe_layer_interval", 1),
    )
    last = layers - 1 if last == -1 else last
    sparse = [(layer + 1) % step == 0 and first <= layer <= last for layer in range(layers)]
    return dataclasses.replace(ernie4_5.config(keys), moe=tuple(spec if is_sparse else None for is_sparse in sparse))


module = decoder_of("CorrectedBlock")


def experts(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, spec = f"model.layers.{layer}.mlp", config.moe[layer]
    sources = usual_expert_sources(config, layer)
    if spec is None:
        return sources
    sources["mlp.correction"] = one(f"{prefix}.moe_statics.e_score_correction_bias", 1)
    return sources | (shared_sources(config, layer, f"{prefix}.shared_experts") if spec.shared_size else {})


manifest = manifest_of(attention_sources, norm_sources, experts)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    keys = {
        **model.experts("moe_num_experts", of_token="moe_k"),
        "moe_num_shared_experts": model.integer("expert_shared_count", 0),
        "moe_layer_start_index": model.integer("leading_dense_block_count", 0),
        "moe_layer_interval": model.integer("interleave_moe_layer_step", 1),
    }
    shared = model.decoder("layer_norm_rms_epsilon", "expert_shared_count", "leading_dense_block_count")
    return shared | keys | model.rope()


GGUF = GgufForm(architecture="ernie4_5-moe", read=read_gguf, reads_only="rekindle does not write shared experts")
ALIASES = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
FAMILY = Family("Ernie4_5_MoeForCausalLM", config, module, manifest, ALIASES, gguf=GGUF)
