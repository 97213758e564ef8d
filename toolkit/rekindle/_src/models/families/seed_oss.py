"""Seed-OSS: Llama with biases of q, k and v, and of the output projection where its own key says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import manifest, module
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    return decoder(
        keys,
        kv_heads_implied=True,
        head_dim=keys.size("head_dim"),
        qkv_bias=keys.get("attention_bias", True),
        o_bias=keys.get("attention_out_bias", False),
        mlp_bias=keys.get("mlp_bias", False),
    )


def read_gguf(model: GgufModel) -> dict[str, Any]:
    biases = {
        "attention_bias": model.has("blk.0.attn_q.bias"),
        "attention_out_bias": model.has("blk.0.attn_output.bias"),
    }
    return model.decoder() | biases | model.rope()


GGUF = GgufForm(architecture="seed_oss", read=read_gguf, names={"post_attention_layernorm": "post_attention_norm"})
FAMILY = Family("SeedOssForCausalLM", config, module, manifest, gguf=GGUF)
