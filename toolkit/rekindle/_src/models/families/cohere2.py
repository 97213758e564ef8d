"""Cohere2 (Command R7B, Command A): attention and MLP side by side behind one layer norm; only windows rotate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.llama import attention_sources, manifest_of, mlp_sources, norms_of
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel
    from rekindle._src.models.precision import Precision


def config(keys: Keys) -> ModelConfig:
    layers = keys.size("num_hidden_layers")
    head_dim = keys.head_dim
    pattern = keys.size("sliding_window_pattern", 4)
    slides = keys.layer_types([(layer + 1) % pattern != 0 for layer in range(layers)])
    full = AttentionSpec(scale=head_dim**-0.5)
    rope = keys.rope(head_dim, interleaved=True)
    nearby = dataclasses.replace(full, sliding_window=keys.window(4096), rope=rope)
    return decoder(
        keys,
        kv_heads_implied=True,
        tie=True,
        norm_eps=keys.get("layer_norm_eps", 1e-5),
        attention=tuple(nearby if slide else full for slide in slides),
        logit_scale=float(keys.get("logit_scale", 0.0625)),
        attention_bias=keys.get("attention_bias", False),
    )


def module(config: ModelConfig, precision: Precision) -> Any:
    from rekindle._src.models.nn.decoders import ParallelDecoder

    return ParallelDecoder(config, precision)


manifest = manifest_of(attention_sources, norms_of(norm="input_layernorm"), mlp_sources)
NORM = "layer_norm_epsilon"


def read_gguf(model: GgufModel) -> dict[str, Any]:
    shared = model.decoder(NORM)
    keys = {"logit_scale": model.number("logit_scale"), "sliding_window": model.integer("attention.sliding_window")}
    return shared | {"layer_norm_eps": shared.pop("rms_norm_eps")} | keys | model.rope()


def logit_scale(config: ModelConfig) -> dict[str, Any]:
    return {"logit_scale": config.logit_scale}


def windows(slides: Sequence[bool]) -> dict[str, Any]:
    if list(slides) != [(layer + 1) % 4 != 0 for layer in range(len(slides))]:
        raise ValueError("in llama.cpp every fourth layer of Cohere2 has no window, and here others have none")
    return {}


GGUF = GgufForm(
    architecture="cohere2",
    read=read_gguf,
    norm=NORM,
    fields=logit_scale,
    windows=windows,
    rotates=lambda layer: (layer + 1) % 4 != 0,
)
FAMILY = Family("Cohere2ForCausalLM", config, module, manifest, gguf=GGUF)
