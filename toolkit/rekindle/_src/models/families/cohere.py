"""Cohere (Command R) and Cohere2 (Command R7B, Command A): attention and MLP in parallel after one layer norm.

In Cohere2 three of four layers have windows, and only those rotate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.llama import attention_sources, manifest_of, mlp_sources, norms_of
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder


def config(keys: ConfigKeys) -> ModelConfig:
    keys.only("use_qk_norm", False)
    return _decoder(keys, rope=keys.rope(keys.head_dim, theta=500_000.0, interleaved=True))


def config2(keys: ConfigKeys) -> ModelConfig:
    head_dim, pattern = keys.head_dim, keys.size("sliding_window_pattern", 4)
    slides = keys.layer_types([(layer + 1) % pattern != 0 for layer in range(keys.size("num_hidden_layers"))])
    full = AttentionSpec(scale=head_dim**-0.5)
    nearby = dataclasses.replace(full, sliding_window=keys.window(4096), rope=keys.rope(head_dim, interleaved=True))
    return _decoder(keys, attention=tuple(nearby if slide else full for slide in slides))


def _decoder(keys: ConfigKeys, **options: Any) -> ModelConfig:
    return decoder(
        keys,
        kv_heads_implied=True,
        tie=True,
        norm_eps=keys.get("layer_norm_eps", 1e-5),
        logit_scale=float(keys.get("logit_scale", 0.0625)),
        attention_bias=keys.get("attention_bias", False),
        **options,
    )


module = decoder_of("ParallelBlock", "ParallelDecoder")
manifest = manifest_of(attention_sources, norms_of(norm="input_layernorm"), mlp_sources)
NORM = "layer_norm_epsilon"


def read_gguf(model: GgufModel, theta: float = 500_000.0) -> dict[str, Any]:
    keys = model.decoder(NORM)
    keys["layer_norm_eps"] = keys.pop("rms_norm_eps")
    return keys | {"logit_scale": model.number("logit_scale")} | model.rope(theta=theta)


def read_gguf2(model: GgufModel) -> dict[str, Any]:
    return read_gguf(model, 10_000.0) | {"sliding_window": model.integer("attention.sliding_window")}


def logit_scale(config: ModelConfig) -> dict[str, Any]:
    return {"logit_scale": config.logit_scale}


def slides(layer: int) -> bool:
    return (layer + 1) % 4 != 0


def windows(layers: Sequence[bool]) -> dict[str, Any]:
    if list(layers) != list(map(slides, range(len(layers)))):
        raise ValueError("in llama.cpp every fourth layer of Cohere2 has no window, and here others have none")
    return {}


GGUF = GgufForm(architecture="command-r", read=read_gguf, norm=NORM, fields=logit_scale)
GGUF2 = GgufForm(
    architecture="cohere2", read=read_gguf2, norm=NORM, fields=logit_scale, windows=windows, rotates=slides
)
FAMILIES = {
    "cohere": Family("CohereForCausalLM", config, module, manifest, gguf=GGUF, layer_norms=True),
    "cohere2": Family("Cohere2ForCausalLM", config2, module, manifest, gguf=GGUF2, layer_norms=True),
}
