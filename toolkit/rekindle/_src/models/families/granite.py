"""Granite 3: Llama with a factor for embeddings, scores, what each half of a block adds, and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families.llama import manifest
from rekindle._src.models.family import Family, GgufForm, decoder_of
from rekindle._src.models.hf_config import Keys, decoder

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    return decoder(keys, kv_heads_implied=True, **granite_fields(keys))


def granite_fields(keys: Keys) -> dict[str, Any]:
    """Return the fields that all of Granite's families read alike."""
    head_dim = keys.head_dim
    spec = AttentionSpec(scale=float(keys.get("attention_multiplier", 1.0)), rope=keys.rope(head_dim))
    return {
        "attention": (spec,) * keys.size("num_hidden_layers"),
        "embed_scale": float(keys.get("embedding_multiplier", 1.0)),
        "residual_scale": float(keys.get("residual_multiplier", 1.0)),
        "logit_scale": 1.0 / float(keys.get("logits_scaling", 1.0)),
        "attention_bias": keys.get("attention_bias", False),
        "mlp_bias": keys.get("mlp_bias", False),
    }


module = decoder_of("ScaledBlock")


def read_gguf(model: GgufModel) -> dict[str, Any]:
    biases = {"attention_bias": model.has("blk.0.attn_q.bias"), "mlp_bias": model.has("blk.0.ffn_gate.bias")}
    return model.decoder() | biases | gguf_factors(model) | model.rope()


def gguf_factors(model: GgufModel) -> dict[str, Any]:
    return {
        "attention_multiplier": model.number("attention.scale", model.head_dim**-0.5),
        "embedding_multiplier": model.number("embedding_scale", 1.0),
        "residual_multiplier": model.number("residual_scale", 1.0),
        "logits_scaling": model.number("logit_scale", 1.0),
    }


def factors(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention.scale": config.attention[0].scale,
        "embedding_scale": config.embed_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": 1.0 / config.logit_scale,
    }


GGUF = GgufForm(architecture="granite", read=read_gguf, paired=True, scales=True, fields=factors)
FAMILY = Family("GraniteForCausalLM", config, module, manifest, gguf=GGUF)
