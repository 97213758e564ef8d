"""SmolLM3: Llama without rotary embeddings in every fourth layer."""

from __future__ import annotations

import dataclasses
from typing import Any

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.llama import manifest, module
from rekindle._src.models.family import Family, GgufForm, GgufModel
from rekindle._src.models.hf_config import ConfigKeys, decoder

INTERVAL = 4  # every fourth layer does not rotate


def config(keys: ConfigKeys) -> ModelConfig:
    layers = keys.size("num_hidden_layers")
    head_dim = keys.head_dim
    interval = keys.size("no_rope_layer_interval", 4)
    rotates = keys.get("no_rope_layers", [(layer + 1) % interval != 0 for layer in range(layers)])
    window = keys.window()
    by_default = window is not None and keys.get("use_sliding_window", False)
    slides = keys.layer_types([by_default and not rotates[layer] for layer in range(layers)])
    spec = AttentionSpec(scale=head_dim**-0.5, rope=keys.rope(head_dim, theta=2_000_000.0))
    return decoder(
        keys,
        tie=True,
        attention=tuple(
            dataclasses.replace(
                spec, rope=spec.rope if rotates[layer] else None, sliding_window=window if slides[layer] else None
            )
            for layer in range(layers)
        ),
        attention_bias=keys.get("attention_bias", False),
        mlp_bias=keys.get("mlp_bias", False),
    )


def read_gguf(model: GgufModel) -> dict[str, Any]:
    known = {"no_rope_layer_interval": INTERVAL, "use_sliding_window": False}  # by the architecture
    return model.decoder() | known | model.rope()


GGUF = GgufForm(architecture="smollm3", read=read_gguf, paired=True, rotates=lambda layer: (layer + 1) % INTERVAL != 0)
FAMILIES = {"smollm3": Family("SmolLM3ForCausalLM", config, module, manifest, gguf=GGUF)}
