"""EXAONE 4: norms after attention and MLP and over heads of q and k; where layers have windows, only those rotate."""

from __future__ import annotations

import dataclasses
from typing import Any

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.llama import attention_sources, manifest_of, mlp_sources, qk_norm_sources
from rekindle._src.models.families.olmo2 import POST_NORMED, post_norm_sources
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle.errors import UnsupportedModel


def config(keys: ConfigKeys) -> ModelConfig:
    head_dim = keys.head_dim
    spec = AttentionSpec(scale=head_dim**-0.5, rope=keys.rope(head_dim))
    window = keys.window(4096)
    nearby = dataclasses.replace(spec, sliding_window=window)
    full = spec if window is None else dataclasses.replace(spec, rope=None)
    slides = keys.layer_types(_slides(keys, window))
    return decoder(keys, eps=1e-5, attention=tuple(nearby if slide else full for slide in slides))


def _slides(keys: ConfigKeys, window: int | None) -> list[bool]:
    layers = keys.size("num_hidden_layers")
    pattern: Any = keys.nullable("sliding_window_pattern", 4)
    if window is None or pattern is None:
        return [False] * layers
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise UnsupportedModel(
                f"sliding_window_pattern={pattern[:80]!r} has letters other than L and G. Check the file."
            )
        return [pattern[layer % len(pattern)] == "L" and layer < layers - 1 for layer in range(layers)]
    return [(layer + 1) % keys.size("sliding_window_pattern", 4) != 0 for layer in range(layers)]


module = decoder_of("QkNormPostNormBlock")
manifest = manifest_of(attention_sources, qk_norm_sources, post_norm_sources, mlp_sources)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    keys = {"sliding_window": model.window, "sliding_window_pattern": 4 if model.window else None}
    return model.decoder() | keys | model.sliding_layers() | model.rope()


GGUF = GgufForm(
    architecture="exaone4", read=read_gguf, names=POST_NORMED, reads_only="rekindle does not write its windows"
)
FAMILIES = {"exaone4": Family("Exaone4ForCausalLM", config, module, manifest, gguf=GGUF)}
