"""Apertus: Llama with norms over each head of q and k, and an MLP of xIELU, without a gate."""

from __future__ import annotations

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import (
    attention_sources,
    manifest_of,
    norms_of,
    plain_mlp,
    qk_norm_sources,
)
from rekindle._src.models.family import Family, GgufForm, decoder_of, with_biases
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.gguf.rewrites import TensorRewrite
from rekindle._src.models.loading.manifest import Source, one

THETA = 12_000_000.0
ROPE = {  # of a config without one
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def config(keys: ConfigKeys) -> ModelConfig:
    keys.only("hidden_act", "xielu")
    if not (keys.get("rope_parameters") or keys.get("rope_scaling") or "rope_theta" in keys.raw):
        keys = ConfigKeys({**keys.raw, "rope_parameters": ROPE})
    return decoder(
        keys,
        kv_heads_implied=True,
        theta=THETA,
        eps=1e-5,
        activation="xielu",
        attention_bias=keys.get("attention_bias", False),
    )


module = decoder_of("XieluBlock")
norm_sources = norms_of(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm")


def mlp_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix = f"model.layers.{layer}.mlp"
    return {
        **plain_mlp(config, config.intermediate_size, prefix),
        "mlp.above": one(f"{prefix}.act_fn.alpha_p", 1),
        "mlp.below": one(f"{prefix}.act_fn.alpha_n", 1),
        "mlp.slope": one(f"{prefix}.act_fn.beta", 1, tiled=True),  # these two have no axis
        "mlp.limit": one(f"{prefix}.act_fn.eps", 1, tiled=True),
    }


manifest = manifest_of(attention_sources, qk_norm_sources, norm_sources, mlp_sources)


def rewritten(config: ModelConfig, layer: int, name: str) -> TensorRewrite | None:
    """Return the shape of the numbers that have no axis."""
    return TensorRewrite(()) if name in ("mlp.act_fn.beta", "mlp.act_fn.eps") else None


NUMBERS = {f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}
GGUF = GgufForm(
    architecture="apertus",
    read=with_biases(attention_bias="attn_q"),
    names={"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
    numbers=NUMBERS,
    rewritten=rewritten,
    activation="xielu",
)
FAMILIES = {"apertus": Family("ApertusForCausalLM", config, module, manifest, gguf=GGUF)}
