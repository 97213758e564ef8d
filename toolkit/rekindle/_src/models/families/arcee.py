"""Arcee (AFM-4.5B): Llama with an MLP that has no gate and a squared ReLU."""

from __future__ import annotations

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import attention_sources, manifest_of, norm_sources, plain_mlp
from rekindle._src.models.family import Family, GgufForm, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Source


def config(keys: ConfigKeys) -> ModelConfig:
    return decoder(
        keys,
        kv_heads_implied=True,
        eps=1e-5,
        activation=keys.activation(default="relu2"),
        attention_bias=keys.get("attention_bias", False),
        mlp_bias=keys.get("mlp_bias", False),
    )


def mlp_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    return plain_mlp(config, config.intermediate_size, f"model.layers.{layer}.mlp")


module = decoder_of("PlainBlock")
manifest = manifest_of(attention_sources, norm_sources, mlp_sources)
GGUF = GgufForm(architecture="arcee", paired=True, activation="relu2")
FAMILIES = {"arcee": Family("ArceeForCausalLM", config, module, manifest, gguf=GGUF)}
