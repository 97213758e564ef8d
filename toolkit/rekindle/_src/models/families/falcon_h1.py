"""Falcon-H1: attention and Mamba-2 side by side in each layer, with factors for what each part reads and returns."""

from __future__ import annotations

import dataclasses
from typing import Any

from rekindle._src.models.config import AttentionSpec, ModelConfig, Multipliers, Pages
from rekindle._src.models.families import granitemoehybrid
from rekindle._src.models.families.llama import attention_sources, manifest_of, mlp_of, norms_of
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Source


def config(keys: ConfigKeys) -> ModelConfig:
    for bias in ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"):
        keys.only(bias, False)
    keys.only("mamba_conv_bias", True)
    keys.only("hidden_act", "silu")
    heads, layers, hidden = keys.size("num_attention_heads"), keys.size("num_hidden_layers"), keys.size("hidden_size")
    head_dim = keys.size("head_dim", hidden // heads)
    into, factors = _factor(keys, "attention_in_multiplier"), _multipliers(keys)
    # Queries, keys and values are multiplied by `into`: the scores twice, and the result once.
    spec = AttentionSpec(scale=head_dim**-0.5 * _factor(keys, "key_multiplier") * into**2, rope=keys.rope(head_dim))
    state = dataclasses.replace(
        granitemoehybrid.state_of(keys, keys.size("mamba_d_ssm", 1024) if keys.nullable("mamba_d_ssm", 1024) else None),
        normed=keys.get("mamba_rms_norm", False),
        norm_first=keys.get("mamba_norm_before_gate", True),
    )
    found = decoder(
        keys,
        kv_heads_implied=True,
        eps=1e-5,
        attention=(spec,) * layers,
        recurrent=(state,) * layers,
        multipliers=dataclasses.replace(factors, attention=factors.attention * into),
        embed_scale=_factor(keys, "embedding_multiplier"),
        logit_scale=_factor(keys, "lm_head_multiplier"),
    )
    pages = Pages(found.num_kv_heads, head_dim, head_dim)
    return dataclasses.replace(found, pages=(pages,) * layers)


def _factor(keys: ConfigKeys, name: str) -> float:
    return float(keys.get(name, 1.0))


def _multipliers(keys: ConfigKeys) -> Multipliers:
    gate, mlp = map(float, keys.get("mlp_multipliers", (1.0, 1.0)))
    into = _factor(keys, "ssm_in_multiplier")
    z, x, b, c, step = (into * float(factor) for factor in keys.get("ssm_multipliers", (1.0,) * 5))
    return Multipliers(
        attention=_factor(keys, "attention_out_multiplier"),
        state=_factor(keys, "ssm_out_multiplier"),
        inputs=(z, x, b, c, step),
        gate=gate,
        mlp=mlp,
    )


module = decoder_of("TwofoldBlock")


def mixer_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    spec = config.states[layer]
    assert spec is not None, "every layer has a state"
    sources = attention_sources(config, layer)
    heads = {path.replace("attention.", "attention.heads.", 1): source for path, source in sources.items()}
    return heads | granitemoehybrid.state_sources(
        spec, config.hidden_size, "attention.recurrence", f"model.layers.{layer}.mamba"
    )


norm_sources = norms_of(attention_norm="input_layernorm", mlp_norm="pre_ff_layernorm")
mlp_sources = mlp_of("feed_forward")
manifest = manifest_of(mixer_sources, norm_sources, mlp_sources, norm="model.final_layernorm")


def read_gguf(model: GgufModel) -> dict[str, Any]:
    """Return the keys of a file; its matrices already include the factors."""
    normed = model.has("blk.0.ssm_norm.weight")
    own = {
        "mamba_d_ssm": model.integer("ssm.inner_size"),
        "mamba_rms_norm": normed,
        "mamba_norm_before_gate": not normed,
    }
    return model.decoder() | granitemoehybrid.gguf_state(model) | model.rope() | own


GGUF = GgufForm(
    architecture="falcon-h1",
    read=read_gguf,
    names={
        **granitemoehybrid.state_names("mamba"),
        "feed_forward.gate_proj": "ffn_gate",
        "feed_forward.up_proj": "ffn_up",
        "feed_forward.down_proj": "ffn_down",
    },
    tensors={
        **granitemoehybrid.state_tensors("mamba"),
        "pre_ff_layernorm.weight": "ffn_norm",
    },  # without an end, as llama.cpp asks for it
    rewritten=lambda config, layer, name: (
        granitemoehybrid.rewritten_state(config, layer, name) if name.startswith("mamba.") else None
    ),
    reads_only="rekindle does not write states' matrices",
)
FAMILIES = {"falcon_h1": Family("FalconH1ForCausalLM", config, module, manifest, gguf=GGUF)}
