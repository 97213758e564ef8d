"""Starcoder2: GPT-2's layers, with ropes in place of learned positions and with fewer heads of keys and values."""

from __future__ import annotations

from typing import Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import attention_sources, blocks, outer_sources, plain_mlp
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Manifest, Source, one


def config(keys: ConfigKeys) -> ModelConfig:
    bias = keys.get("use_bias", True)
    return decoder(
        keys,
        tie=True,
        window=keys.window(),
        activation=keys.activation(default="gelu_pytorch_tanh"),
        norm_eps=keys.get("norm_epsilon", 1e-5),
        attention_bias=bias,
        mlp_bias=bias,
    )


module = decoder_of("LayerNormBlock", "LayerNormDecoder")


def manifest(config: ModelConfig) -> Manifest:
    outer = outer_sources(config) | {"norm.bias": one("model.norm.bias", config.hidden_size)}
    return Manifest(outer | blocks(config, attention_sources, _norms, _mlp))


def _norms(config: ModelConfig, layer: int) -> dict[str, Source]:
    return {
        f"{module}.{end}": one(f"model.layers.{layer}.{name}.{end}", config.hidden_size)
        for module, name in (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm"))
        for end in ("weight", "bias")
    }


def _mlp(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix = f"model.layers.{layer}.mlp"
    return plain_mlp(config, config.intermediate_size, prefix, up="c_fc", down="c_proj", module="")


NORM = "layer_norm_epsilon"


def read_gguf(model: GgufModel) -> dict[str, Any]:
    shared = model.decoder(NORM)
    keys = {"norm_epsilon": shared.pop("rms_norm_eps"), "use_bias": model.has("blk.0.attn_q.bias")}
    return shared | keys | model.rope()


GGUF = GgufForm(architecture="starcoder2", read=read_gguf, norm=NORM, activation="gelu_tanh")
FAMILIES = {"starcoder2": Family("Starcoder2ForCausalLM", config, module, manifest, gguf=GGUF, layer_norms=True)}
