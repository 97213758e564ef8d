"""SmolLM3: Llama without rotary embeddings in every fourth layer."""

from __future__ import annotations

import dataclasses

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.llama import Llama, manifest
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import Keys, decoder


def config(keys: Keys) -> ModelConfig:
    layers = keys.size("num_hidden_layers")
    head_dim = keys.size("head_dim", keys.size("hidden_size") // keys.size("num_attention_heads"))
    interval = keys.size("no_rope_layer_interval", 4)
    rotates = keys.get("no_rope_layers", [(layer + 1) % interval != 0 for layer in range(layers)])
    window = keys.window() if keys.get("use_sliding_window", False) else None
    slides = keys.layer_types([window is not None and not rotates[layer] for layer in range(layers)])
    spec = AttentionSpec(scale=head_dim**-0.5, rope=keys.rope(head_dim, theta=2_000_000.0))
    bias = keys.get("attention_bias", False)
    return decoder(
        keys,
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


FAMILY = Family("SmolLM3ForCausalLM", config, SmolLM3, manifest)
