"""Gemma 2: norms before and after each half of a block, soft caps, a sliding window in every other layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.llama import attention_sources, manifest_of, mlp_sources, norms_of
from rekindle._src.models.family import Family, GgufForm, decoder_of
from rekindle._src.models.hf_config import Keys, decoder

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel

LARGE = 46  # layers
POST_NORMED = {"post_attention_layernorm": "post_attention_norm"}


def config(keys: Keys) -> ModelConfig:
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


def gemma_fields(keys: Keys, head_dim: int) -> dict[str, Any]:
    """Return the fields that Gemma 2 and Gemma 3 read alike."""
    return {
        "head_dim": head_dim,
        "tie": True,
        "activation": keys.activation("hidden_activation", "gelu_pytorch_tanh"),
        "embed_scale": keys.size("hidden_size") ** 0.5,
        "attention_bias": keys.get("attention_bias", False),
    }


module = decoder_of("SandwichBlock")
NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
sandwich_norm_sources = norms_of(add=1.0, **NORMS)  # Gemma checkpoints store norm weights minus one
manifest = manifest_of(attention_sources, sandwich_norm_sources, mlp_sources, add=1.0)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    model.only("attention.sliding_window_pattern", 2)
    shared = model.decoder()
    own = {
        "sliding_window": model.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": model.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.number("final_logit_softcapping", 30.0),
    }
    return shared | own | gemma_keys(model, shared, large=LARGE) | model.rope()


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


GGUF = GgufForm(
    architecture="gemma2", read=read_gguf, names=POST_NORMED, activation="gelu_tanh", windows=windows,
    scale_dim=gemma_scale_dim(LARGE),
)  # fmt: skip
FAMILY = Family("Gemma2ForCausalLM", config, module, manifest, gguf=GGUF)
