"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; the upper layers can have sliding windows.

Qwen2-MoE and Qwen1.5-MoE have experts in some or all layers, alongside a shared MLP with a gate.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families import llama
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Source


def config(keys: ConfigKeys) -> ModelConfig:
    keys.only("use_mrope", False)
    window, slides = sliding(keys)
    return decoder(keys, window=window, slides=slides.__getitem__, qkv_bias=True)


def moe_config(keys: ConfigKeys) -> ModelConfig:
    normalize, shared = keys.get("norm_topk_prob", False), keys.size("shared_expert_intermediate_size")
    spec = keys.experts(normalize=normalize, shared_size=shared, shared_gate=True)
    window, slides = sliding(keys, lambda layer, first: layer % 2 == 0 and layer < first)
    moe = tuple(spec if sparse else None for sparse in sparse_layers(keys))
    bias = keys.get("qkv_bias", True)
    return decoder(keys, window=window, slides=slides.__getitem__, qkv_bias=bias, moe=moe)


def sliding(keys: ConfigKeys, slides: Callable[[int, int], bool] = operator.ge) -> tuple[int | None, tuple[bool, ...]]:
    """Return the sliding window, and which layers use it, from the keys of Qwen2's and Qwen3's configs.

    `slides` says of a layer and `max_window_layers` whether it does where config.json has no `layer_types`.
    """
    window = keys.window(4096) if keys.get("use_sliding_window", False) else None
    first = keys.get("max_window_layers", 28)
    default = [window is not None and slides(layer, first) for layer in range(keys.size("num_hidden_layers"))]
    return window, keys.layer_types(default)


def sparse_layers(keys: ConfigKeys) -> list[bool]:
    """Return which layers have experts."""
    dense, step = frozenset(keys.get("mlp_only_layers", ())), keys.size("decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(keys.size("num_hidden_layers"))]


def moe_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix = f"model.layers.{layer}.mlp"
    shared = llama.shared_sources(config, layer, f"{prefix}.shared_expert", f"{prefix}.shared_expert_gate")
    return llama.usual_expert_sources(config, layer) | shared


moe_module = decoder_of("SparseBlock")
moe_manifest = llama.manifest_of(llama.attention_sources, llama.norm_sources, moe_sources)


def read_moe_gguf(model: GgufModel) -> dict[str, Any]:
    keys = {
        **model.experts(),
        "shared_expert_intermediate_size": model.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,  # known by the architecture
    }
    return model.decoder() | keys | model.rope()


MOE_GGUF = GgufForm(architecture="qwen2moe", read=read_moe_gguf, reads_only="rekindle does not write shared experts")
FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", config, llama.module, llama.manifest, gguf=GgufForm(architecture="qwen2")),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", moe_config, moe_module, moe_manifest, gguf=MOE_GGUF),
}
