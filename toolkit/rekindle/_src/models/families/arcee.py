"""Arcee (AFM-4.5B): Llama whose MLP has no gate, and squares what is positive."""

from __future__ import annotations

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import attention_sources, manifest_of, norm_sources
from rekindle._src.models.family import Family, GgufForm, decoder_of
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Source, one
from rekindle._src.models.roles import Span, column, row


def config(keys: Keys) -> ModelConfig:
    return decoder(
        keys,
        kv_heads_implied=True,
        eps=1e-5,
        activation=keys.activation(default="relu2"),
        attention_bias=keys.get("attention_bias", False),
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


module = decoder_of("PlainBlock")
manifest = manifest_of(attention_sources, norm_sources, plain_mlp_sources)


GGUF = GgufForm(architecture="arcee", paired=True, activation="relu2")
FAMILIES = {"arcee": Family("ArceeForCausalLM", config, module, manifest, gguf=GGUF)}
