"""Arcee (AFM-4.5B): Llama whose MLP has no gate, and squares what is positive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import attention_sources, blocks, norm_sources, outer_sources
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.roles import Span, column, row

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel
    from rekindle._src.models.precision import Precision


def config(keys: Keys) -> ModelConfig:
    bias = keys.get("attention_bias", False)
    return decoder(
        keys,
        kv_heads_implied=True,
        eps=1e-5,
        activation=keys.activation(default="relu2"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=keys.get("mlp_bias", False),
    )


def plain_mlp_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, inner = f"model.layers.{layer}.mlp", config.intermediate_size
    role = column(Span(inner))
    sources = {
        "mlp.up.weight": one(f"{prefix}.up_proj.weight", inner, role=role),
        "mlp.down.weight": one(f"{prefix}.down_proj.weight", config.hidden_size, role=row(inner)),
    }
    if config.mlp_bias:
        sources |= {
            "mlp.up.bias": one(f"{prefix}.up_proj.bias", inner, role=role),
            "mlp.down.bias": one(f"{prefix}.down_proj.bias", config.hidden_size),
        }
    return sources


def module(config: ModelConfig, precision: Precision) -> Any:
    from rekindle._src.models.nn.decoders import Decoder, PlainBlock

    return Decoder(config, precision, PlainBlock)


def manifest(config: ModelConfig) -> Manifest:
    return Manifest(outer_sources(config) | blocks(config, attention_sources, norm_sources, plain_mlp_sources))


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | model.rope()


GGUF = GgufForm(architecture="arcee", read=read_gguf, paired=True, activation="relu2")
FAMILY = Family("ArceeForCausalLM", config, module, manifest, gguf=GGUF)
