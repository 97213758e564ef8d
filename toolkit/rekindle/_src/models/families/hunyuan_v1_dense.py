"""HunYuan (dense): Llama with norms over each head of q and k after the rotation."""

from __future__ import annotations

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import attention_sources, manifest_of, mlp_sources, norm_sources
from rekindle._src.models.family import Family, GgufForm, decoder_of, with_biases
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Source, one


def config(keys: ConfigKeys) -> ModelConfig:
    head_dim = keys.head_dim
    return decoder(
        keys,
        kv_heads_implied=True,
        eps=1e-5,
        rope=_rope(keys, head_dim).rope(head_dim),
        attention_bias=keys.get("attention_bias", False),
        mlp_bias=keys.get("mlp_bias", False),
    )


def _rope(keys: ConfigKeys, head_dim: int) -> ConfigKeys:
    """Return the keys with a theta in place of "dynamic" with `alpha`, which only stretches it."""
    options = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    kind, alpha = options.get("rope_type", options.get("type")), options.get("alpha")
    if kind != "dynamic" or not alpha:
        return keys
    theta = float(options.get("rope_theta", keys.get("rope_theta", 10_000.0))) * alpha ** (head_dim / (head_dim - 2))
    left = {name: value for name, value in keys.raw.items() if name not in ("rope_scaling", "rope_parameters")}
    return ConfigKeys(left | {"rope_theta": theta})


module = decoder_of("LateNormBlock")


def norms(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix = f"model.layers.{layer}.self_attn"
    return {
        "attention.q_norm.weight": one(f"{prefix}.query_layernorm.weight", config.head_dim),
        "attention.k_norm.weight": one(f"{prefix}.key_layernorm.weight", config.head_dim),
    }


manifest = manifest_of(attention_sources, norms, norm_sources, mlp_sources)


NAMES = {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
GGUF = GgufForm(architecture="hunyuan-dense", read=with_biases(attention_bias="attn_q"), names=NAMES)
FAMILIES = {"hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM", config, module, manifest, gguf=GGUF)}
