"""Granite 3: Llama with a factor for embeddings, scores, what each half of a block adds, and logits.

All experts of a layer are one tensor, and one of the families with experts has a shared MLP alongside them.
"""

from __future__ import annotations

from typing import Any

from rekindle._src.models import roles
from rekindle._src.models.config import AttentionSpec, ModelConfig
from rekindle._src.models.families import llama
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of, with_biases
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Source, one
from rekindle._src.models.roles import row


def config(keys: ConfigKeys) -> ModelConfig:
    return decoder(keys, kv_heads_implied=True, **granite_fields(keys))


def moe_config(keys: ConfigKeys) -> ModelConfig:
    return decoder(keys, kv_heads_implied=True, **granite_moe_fields(keys))


def shared_config(keys: ConfigKeys) -> ModelConfig:
    shared = keys.size("shared_intermediate_size", 1024)
    return decoder(keys, kv_heads_implied=True, **granite_moe_fields(keys, shared))


def granite_fields(keys: ConfigKeys) -> dict[str, Any]:
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


def granite_moe_fields(keys: ConfigKeys, shared_size: int = 0) -> dict[str, Any]:
    # The softmax is over the chosen experts.
    spec = keys.experts("num_local_experts", size="intermediate_size", normalize=True, shared_size=shared_size)
    return granite_fields(keys) | {"moe": (spec,) * keys.size("num_hidden_layers")}


def fused_expert_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    spec, prefix = config.moe[layer], f"model.layers.{layer}"
    assert spec is not None, "every layer has experts"
    count, inner, experts = spec.num_experts, spec.intermediate_size, f"{prefix}.block_sparse_moe"
    wide, narrow = roles.experts(count, llama.gate_up_role(inner)), roles.experts(count, row(inner))
    sources = {
        "mlp.router.weight": one(f"{experts}.router.layer.weight", count),
        "mlp.gate_up.weight": one(f"{experts}.input_linear.weight", count, role=wide),
        "mlp.down.weight": one(f"{experts}.output_linear.weight", count, role=narrow),
    }
    return sources | (shared_mlp(config, layer, "mlp.shared", spec.shared_size) if spec.shared_size else {})


def shared_mlp(config: ModelConfig, layer: int, module: str, size: int) -> dict[str, Source]:
    name = f"model.layers.{layer}.shared_mlp"
    return llama.fused_mlp(config, size, f"{name}.input_linear", f"{name}.output_linear", module=module)


module = decoder_of("ScaledBlock")
moe_manifest = llama.manifest_of(llama.attention_sources, llama.norm_sources, fused_expert_sources)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return with_biases(attention_bias="attn_q", mlp_bias="ffn_gate")(model) | gguf_factors(model)


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
FAMILIES = {
    "granite": Family("GraniteForCausalLM", config, module, llama.manifest, gguf=GGUF),
    "granitemoe": Family("GraniteMoeForCausalLM", moe_config, module, moe_manifest),
    "granitemoeshared": Family("GraniteMoeSharedForCausalLM", shared_config, module, moe_manifest),
}
