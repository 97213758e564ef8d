"""Mistral: Llama with a sliding window in every layer. Mixtral has a mixture of experts in every layer, too.

The queries of Ministral 3 grow with the logarithm of their position beyond the pre-training length.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families import llama
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of, windows_in_all_layers
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Source


def config(keys: ConfigKeys) -> ModelConfig:
    return decoder(keys, window=keys.window(4096))


def growing_config(keys: ConfigKeys) -> ModelConfig:
    head_dim = keys.size("head_dim")
    options = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    rope = keys.rope(head_dim, theta=1_000_000.0)
    growth = float(options.get("llama_4_scaling_beta") or 0.0)
    if growth:
        length = int(options.get("original_max_position_embeddings") or keys.size("max_position_embeddings"))
        rope = dataclasses.replace(rope, query_growth=growth, original_length=length)
    return decoder(keys, eps=1e-5, window=keys.window(), rope=rope)


def moe_config(keys: ConfigKeys) -> ModelConfig:
    moe = keys.experts("num_local_experts", size="intermediate_size", normalize=True)
    layers = keys.size("num_hidden_layers")
    return decoder(keys, theta=1_000_000.0, eps=1e-5, window=keys.window(), moe=(moe,) * layers)


def experts(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix = f"model.layers.{layer}.block_sparse_moe"
    return llama.expert_sources(config, layer, f"{prefix}.gate", f"{prefix}.experts", ("w1", "w3", "w2"))


moe_module = decoder_of("SparseBlock")
moe_manifest = llama.manifest_of(llama.attention_sources, llama.norm_sources, experts)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | {"sliding_window": model.window} | model.rope()


def read_growing_gguf(model: GgufModel) -> dict[str, Any]:
    rope = model.rope()
    growth = model.number("attention.temperature_scale", 0.0)
    scaling = rope.pop("rope_scaling", {"rope_type": "default"})
    if weight := model.number("rope.scaling.yarn_log_multiplier", 0.0):
        scaling |= {"mscale": weight, "mscale_all_dim": weight}
    return model.decoder() | {"rope_parameters": {**rope, **scaling, "llama_4_scaling_beta": growth}}


def read_moe_gguf(model: GgufModel) -> dict[str, Any]:
    return read_gguf(model) | model.experts("num_local_experts", size=None)


GGUF = GgufForm(architecture="llama", read=read_gguf, paired=True, windows=windows_in_all_layers)
MOE_GGUF = dataclasses.replace(GGUF, read=read_moe_gguf, expert_length=False)
GROWING_GGUF = GgufForm(
    architecture="mistral3",
    read=read_growing_gguf,
    paired=True,
    reads_only="rekindle does not write its scaling of queries",
)
# Those of Mistral Small 3.
NESTED = {
    "vocab_size": 131_072, "hidden_size": 5120, "intermediate_size": 32_768, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "rope_theta": 1_000_000_000.0, "sliding_window": None,
}  # fmt: skip
ALIASES = {"num_experts": "num_local_experts"}
FAMILIES = {
    "mistral": Family("MistralForCausalLM", config, llama.module, llama.manifest, gguf=GGUF, nested=NESTED),
    "ministral3": Family("Ministral3ForCausalLM", growing_config, llama.module, llama.manifest, gguf=GROWING_GGUF),
    "mixtral": Family("MixtralForCausalLM", moe_config, moe_module, moe_manifest, ALIASES, MOE_GGUF),
}
