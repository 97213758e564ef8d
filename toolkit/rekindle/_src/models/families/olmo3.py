"""OLMo 3: OLMo 2 with a sliding window in three of four layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.olmo2 import POST_NORMED, manifest, module
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    layers = keys.size("num_hidden_layers")
    head_dim = keys.head_dim
    by_type = keys.has_rope_per_layer_type()
    full, nearby = (
        AttentionSpec(scale=head_dim**-0.5, rope=keys.rope(head_dim, theta=500_000.0, layer_type=kind))
        for kind in (("full_attention", "sliding_attention") if by_type else (None, None))
    )
    if not by_type:  # older files: the scaling is that of layers that see everything
        plain = Keys({name: value for name, value in keys.raw.items() if name != "rope_scaling"})
        nearby = dataclasses.replace(nearby, rope=plain.rope(head_dim, theta=500_000.0))
    nearby = dataclasses.replace(nearby, sliding_window=keys.window(4096))
    slides = keys.layer_types([(layer + 1) % 4 != 0 for layer in range(layers)])
    return decoder(
        keys,
        kv_heads_implied=True,
        eps=1e-5,
        attention=tuple(nearby if slide else full for slide in slides),
        attention_bias=keys.get("attention_bias", False),
    )


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return (
        model.decoder()
        | {"sliding_window": model.integer("attention.sliding_window")}
        | model.sliding_layers()
        | model.rope()
    )


def windows(slides: Sequence[bool]) -> dict[str, Any]:
    return {"attention.sliding_window_pattern": list(slides)}


GGUF = GgufForm(architecture="olmo2", read=read_gguf, names=POST_NORMED, windows=windows, local_rope=True)
FAMILY = Family("Olmo3ForCausalLM", config, module, manifest, gguf=GGUF)
