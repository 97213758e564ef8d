"""SmolLM3: Llama where every fourth layer does not rotate."""

from __future__ import annotations

import dataclasses

from rekindle._src.models.config import AttentionSpec, Keys, ModelConfig, decoder, reads
from rekindle._src.models.families.llama import Llama, manifest

__all__ = ["SmolLM3", "config", "manifest"]


@reads("smollm3")
def config(keys: Keys) -> ModelConfig:
    layers = keys.need("num_hidden_layers")
    head_dim = keys.get("head_dim", keys.need("hidden_size") // keys.need("num_attention_heads"))
    interval = keys.get("no_rope_layer_interval", 4)
    rotates = keys.get("no_rope_layers", [(layer + 1) % interval != 0 for layer in range(layers)])
    window = keys.get("sliding_window") if keys.get("use_sliding_window", False) else None
    slides = keys.layer_types([window is not None and not rotates[layer] for layer in range(layers)])
    spec = AttentionSpec(scale=head_dim**-0.5, rope=keys.rope(head_dim, theta=2_000_000.0))
    bias = keys.get("attention_bias", False)
    return decoder(
        keys,
        kv_heads=4,
        tie=True,
        attention=tuple(
            dataclasses.replace(
                spec,
                rope=spec.rope if rotates[layer] else None,
                sliding_window=window if slides[layer] else None,
            )
            for layer in range(layers)
        ),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=keys.get("mlp_bias", False),
    )


class SmolLM3(Llama):
    pass
