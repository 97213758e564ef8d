"""Gemma 3 (text): Gemma 2 with norms over the heads of q and k instead of soft caps, and a local and a global rope.

EmbeddingGemma is the same with attention in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.gemma2 import (
    POST_NORMED,
    gemma_fields,
    gemma_keys,
    gemma_scale_dim,
    sandwich_norm_sources,
)
from rekindle._src.models.families.llama import attention_sources, manifest_of, mlp_sources, qk_norm_sources
from rekindle._src.models.family import Family, GgufForm, decoder_of
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Source

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel

PATTERN = 6  # every sixth layer sees everything, unless a file says otherwise
LARGE = 62  # layers


def config(keys: Keys) -> ModelConfig:
    keys.only("attn_logit_softcapping")
    head_dim = keys.size("head_dim")
    scale = keys.get("query_pre_attn_scalar", 256) ** -0.5
    keys.only("use_bidirectional_attention", False, True)
    causal, window = not keys.get("use_bidirectional_attention", False), keys.window(4096)
    if not causal and window is not None:  # it is the width of the whole window then, before and behind a token
        window = window // 2 + 1
    rope = keys.rope(head_dim, theta=1_000_000.0, layer_type="full_attention")
    everywhere = AttentionSpec(scale=scale, causal=causal, rope=rope)
    nearby = AttentionSpec(
        scale=scale,
        sliding_window=window,
        causal=causal,
        rope=keys.rope(head_dim, layer_type="sliding_attention"),
    )
    pattern = keys.size("sliding_window_pattern", 6)
    slides = keys.layer_types([(layer + 1) % pattern != 0 for layer in range(keys.size("num_hidden_layers"))])
    return decoder(
        keys,
        attention=tuple(nearby if slide else everywhere for slide in slides),
        final_soft_cap=keys.get("final_logit_softcapping"),
        **gemma_fields(keys, head_dim),
    )


module = decoder_of("QkNormSandwichBlock")


def qk_norms(config: ModelConfig, layer: int) -> dict[str, Source]:
    return qk_norm_sources(config, layer, add=1.0)


manifest = manifest_of(attention_sources, qk_norms, sandwich_norm_sources, mlp_sources, add=1.0)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    shared = model.decoder()
    pattern = model.get("attention.sliding_window_pattern", PATTERN)
    sliding = {"sliding_window_pattern": pattern} if isinstance(pattern, int) else model.sliding_layers()
    own = {
        "sliding_window": model.integer("attention.sliding_window"),
        "rope_local_base_freq": model.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": model.number("final_logit_softcapping", None),
    }
    return shared | sliding | own | gemma_keys(model, shared, large=LARGE) | model.rope(theta=1_000_000.0)


def windows(slides: Sequence[bool]) -> dict[str, Any]:
    layers = range(len(slides))
    pattern = next((n for n in range(2, 65) if list(slides) == [(layer + 1) % n != 0 for layer in layers]), None)
    if pattern == PATTERN:
        return {}
    return {"attention.sliding_window_pattern": list(slides) if pattern is None else pattern}


GGUF = GgufForm(
    architecture="gemma3", read=read_gguf, names=POST_NORMED, activation="gelu_tanh", windows=windows, local_rope=True,
    scale_dim=gemma_scale_dim(LARGE),
)  # fmt: skip
NESTED = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
}  # fmt: skip
FAMILY = Family("Gemma3ForCausalLM", config, module, manifest, gguf=GGUF, nested=NESTED)
