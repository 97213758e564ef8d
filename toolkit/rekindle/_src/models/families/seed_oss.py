"""Seed-OSS: Llama with biases of q, k and v, and of the output projection where its own key says so."""

from __future__ import annotations

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import manifest, module
from rekindle._src.models.family import Family, GgufForm, with_biases
from rekindle._src.models.hf_config import ConfigKeys, decoder


def config(keys: ConfigKeys) -> ModelConfig:
    return decoder(
        keys,
        kv_heads_implied=True,
        head_dim=keys.size("head_dim"),
        qkv_bias=keys.get("attention_bias", True),
        o_bias=keys.get("attention_out_bias", False),
        mlp_bias=keys.get("mlp_bias", False),
    )


GGUF = GgufForm(
    architecture="seed_oss",
    read=with_biases(attention_bias="attn_q", attention_out_bias="attn_output"),
    names={"post_attention_layernorm": "post_attention_norm"},
)
FAMILIES = {"seed_oss": Family("SeedOssForCausalLM", config, module, manifest, gguf=GGUF)}
