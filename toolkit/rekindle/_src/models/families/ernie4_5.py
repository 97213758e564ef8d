"""ERNIE 4.5 (0.3B): Llama with rotated pairs of neighbours, and one key for all biases.

21B-A3B has experts from a layer on, chosen with a correction, alongside a shared MLP.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families import llama
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of, with_biases
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Source, one


def config(keys: ConfigKeys) -> ModelConfig:
    head_dim = keys.size("head_dim")
    bias = keys.get("use_bias", False)
    rope = keys.rope(head_dim, theta=500_000.0, interleaved=True)
    return decoder(keys, tie=True, eps=1e-5, head_dim=head_dim, rope=rope, attention_bias=bias, mlp_bias=bias)


def moe_config(keys: ConfigKeys) -> ModelConfig:
    inner, layers = keys.size("moe_intermediate_size"), keys.size("num_hidden_layers")
    keys.only("use_bias", False)
    keys.only("moe_norm_min", 1e-12)  # the least sum that weights are divided by: it is never smaller
    shared_size = inner * keys.whole("moe_num_shared_experts", 2)
    spec = keys.experts("moe_num_experts", of_token="moe_k", normalize=True, correction=True, shared_size=shared_size)
    first, last = keys.get("moe_layer_start_index", 1), keys.get("moe_layer_end_index", -1)
    last, step = layers - 1 if last == -1 else last, keys.size("moe_layer_interval", 1)
    sparse = [(layer + 1) % step == 0 and first <= layer <= last for layer in range(layers)]
    return dataclasses.replace(config(keys), moe=tuple(spec if is_sparse else None for is_sparse in sparse))


def experts(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, sources = f"model.layers.{layer}.mlp", llama.usual_expert_sources(config, layer)
    if config.moe[layer] is None:
        return sources
    sources["mlp.correction"] = one(f"{prefix}.moe_statics.e_score_correction_bias", 1)
    return sources | llama.shared_sources(config, layer, f"{prefix}.shared_experts")


moe_module = decoder_of("CorrectedBlock")
moe_manifest = llama.manifest_of(llama.attention_sources, llama.norm_sources, experts)


def read_moe_gguf(model: GgufModel) -> dict[str, Any]:
    keys = {
        **model.experts("moe_num_experts", of_token="moe_k"),
        "moe_num_shared_experts": model.integer("expert_shared_count", 0),
        "moe_layer_start_index": model.integer("leading_dense_block_count", 0),
        "moe_layer_interval": model.integer("interleave_moe_layer_step", 1),
    }
    shared = model.decoder("layer_norm_rms_epsilon", "expert_shared_count", "leading_dense_block_count")
    return shared | keys | model.rope()


GGUF = GgufForm(architecture="ernie4_5", read=with_biases(use_bias="attn_q"))
MOE_GGUF = GgufForm(
    architecture="ernie4_5-moe", read=read_moe_gguf, reads_only="rekindle does not write shared experts"
)
ALIASES = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
FAMILIES = {
    "ernie4_5": Family("Ernie4_5ForCausalLM", config, llama.module, llama.manifest, gguf=GGUF),
    "ernie4_5_moe": Family("Ernie4_5_MoeForCausalLM", moe_config, moe_module, moe_manifest, ALIASES, MOE_GGUF),
}
