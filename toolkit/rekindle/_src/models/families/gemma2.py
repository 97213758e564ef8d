"""Gemma 2: norms before and after each half of a block, soft caps, a sliding window in every other layer.

Gemma 3 (text) has norms over the heads of q and k instead of soft caps, and a local and a global rope. EmbeddingGemma
is the same with attention in both directions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.llama import attention_sources, manifest_of, mlp_sources, norms_of, qk_norm_sources
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Source

LARGE, LARGE3 = 46, 62  # layers
PATTERN = 6  # every sixth layer of Gemma 3 sees everything, unless a file says otherwise
POST_NORMED = {"post_attention_layernorm": "post_attention_norm"}


def config(keys: ConfigKeys) -> ModelConfig:
    keys.only("use_bidirectional_attention", False)
    head_dim = keys.size("head_dim")
    spec = AttentionSpec(
        scale=keys.get("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=keys.nullable("attn_logit_softcapping", 50.0),
        rope=keys.rope(head_dim),
    )
    sliding = dataclasses.replace(spec, sliding_window=keys.window(4096))
    slides = keys.layer_types([layer % 2 == 0 for layer in range(keys.size("num_hidden_layers"))])
    return decoder(
        keys,
        attention=tuple(sliding if slide else spec for slide in slides),
        final_soft_cap=keys.nullable("final_logit_softcapping", 30.0),
        **gemma_fields(keys, head_dim),
    )


def config3(keys: ConfigKeys) -> ModelConfig:
    keys.only("attn_logit_softcapping")
    head_dim = keys.size("head_dim")
    scale = keys.get("query_pre_attn_scalar", 256) ** -0.5
    keys.only("use_bidirectional_attention", False, True)
    causal, window = not keys.get("use_bidirectional_attention", False), keys.window(4096)
    if not causal and window is not None:  # it is the width of the whole window then, before and after a token
        window = window // 2 + 1
    rope = keys.rope(head_dim, theta=1_000_000.0, layer_type="full_attention")
    everywhere = AttentionSpec(scale=scale, causal=causal, rope=rope)
    rope = keys.rope(head_dim, layer_type="sliding_attention")
    nearby = AttentionSpec(scale=scale, sliding_window=window, causal=causal, rope=rope)
    pattern = keys.size("sliding_window_pattern", PATTERN)
    slides = keys.layer_types([(layer + 1) % pattern != 0 for layer in range(keys.size("num_hidden_layers"))])
    return decoder(
        keys,
        attention=tuple(nearby if slide else everywhere for slide in slides),
        final_soft_cap=keys.get("final_logit_softcapping"),
        **gemma_fields(keys, head_dim),
    )


def gemma_fields(keys: ConfigKeys, head_dim: int) -> dict[str, Any]:
    """Return the fields that Gemma 2 and Gemma 3 read alike."""
    return {
        "head_dim": head_dim,
        "tie": True,
        "activation": keys.activation("hidden_activation", "gelu_pytorch_tanh"),
        "embed_scale": keys.size("hidden_size") ** 0.5,
        "attention_bias": keys.get("attention_bias", False),
    }


def qk_norms(config: ModelConfig, layer: int) -> dict[str, Source]:
    return qk_norm_sources(config, layer, add=1.0)


module, module3 = decoder_of("SandwichBlock"), decoder_of("QkNormSandwichBlock")
NORMS = {
    "attention_norm": "input_layernorm", "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_out_norm": "post_feedforward_layernorm",
}  # fmt: skip
sandwich_norm_sources = norms_of(add=1.0, **NORMS)  # Gemma checkpoints store norm weights minus one
manifest = manifest_of(attention_sources, sandwich_norm_sources, mlp_sources, add=1.0)
manifest3 = manifest_of(attention_sources, qk_norms, sandwich_norm_sources, mlp_sources, add=1.0)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    model.only("attention.sliding_window_pattern", 2)
    shared = model.decoder()
    own = {
        "sliding_window": model.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": model.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.number("final_logit_softcapping", 30.0),
    }
    return shared | own | gemma_keys(model, shared, large=LARGE) | model.rope()


def read_gguf3(model: GgufModel) -> dict[str, Any]:
    shared = model.decoder()
    pattern = model.get("attention.sliding_window_pattern", PATTERN)
    sliding = {"sliding_window_pattern": pattern} if isinstance(pattern, int) else model.sliding_layers()
    own = {
        "sliding_window": model.integer("attention.sliding_window"),
        "rope_local_base_freq": model.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": model.number("final_logit_softcapping", None),
    }
    return shared | sliding | own | gemma_keys(model, shared, large=LARGE3) | model.rope(theta=1_000_000.0)


def gemma_keys(model: GgufModel, shared: dict[str, Any], *, large: int) -> dict[str, Any]:
    """Return the keys that Gemma 2 and 3 share.

    llama.cpp scales scores by the head's size, but for the 27B model, which has `large` layers.
    """
    is_large = shared["num_hidden_layers"] == large
    scale = shared["hidden_size"] // shared["num_attention_heads"] if is_large else shared["head_dim"]
    if (stored := model.number("attention.scale", None)) is not None:
        scale = round(stored**-2, 3)
    return {"query_pre_attn_scalar": scale, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def gemma_scale_dim(large: int) -> Callable[[ModelConfig], int]:
    """Return the same for a config."""
    return lambda config: config.hidden_size // config.num_heads if config.num_layers == large else config.head_dim


def windows(slides: Sequence[bool]) -> dict[str, Any]:
    if list(slides) != [layer % 2 == 0 for layer in range(len(slides))]:
        raise ValueError("llama.cpp gives every other layer of Gemma 2 a sliding window, and here others do")
    return {}


def windows3(slides: Sequence[bool]) -> dict[str, Any]:
    layers = range(len(slides))
    pattern = next((n for n in range(2, 65) if list(slides) == [(layer + 1) % n != 0 for layer in layers]), None)
    if pattern == PATTERN:
        return {}
    return {"attention.sliding_window_pattern": list(slides) if pattern is None else pattern}


GGUF = GgufForm(
    architecture="gemma2", read=read_gguf, names=POST_NORMED, activation="gelu_tanh", windows=windows,
    scale_dim=gemma_scale_dim(LARGE),
)  # fmt: skip
GGUF3 = dataclasses.replace(
    GGUF, architecture="gemma3", read=read_gguf3, windows=windows3, local_rope=True, scale_dim=gemma_scale_dim(LARGE3)
)
NESTED = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
}  # fmt: skip
FAMILIES = {
    "gemma2": Family("Gemma2ForCausalLM", config, module, manifest, gguf=GGUF),
    "gemma3_text": Family("Gemma3ForCausalLM", config3, module3, manifest3, gguf=GGUF3, nested=NESTED),
}
