"""Qwen3.5, 3.6 and 3.8 (text): a gated delta rule in three of four layers, and gated attention in the others.

Some have experts in all layers, alongside a shared MLP with a gate.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rekindle._src.models.config import ModelConfig, RecurrentSpec
from rekindle._src.models.families.llama import blocks, mlp_sources, norms_of, outer_sources, qk_norm_sources
from rekindle._src.models.families.qwen2 import moe_sources
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.gguf.rewrites import HeadOrder, TensorRewrite
from rekindle._src.models.loading.manifest import FusedExperts, Manifest, Source, one
from rekindle._src.models.roles import Span, column, heads, recurrent_spans, row


def config(keys: ConfigKeys) -> ModelConfig:
    return decoder(keys, **mixer_fields(keys))


def moe_config(keys: ConfigKeys) -> ModelConfig:
    spec = keys.experts(normalize=True, shared_size=keys.size("shared_expert_intermediate_size"), shared_gate=True)
    moe = (spec,) * keys.size("num_hidden_layers")
    return decoder(keys, moe=moe, intermediate_size=spec.intermediate_size, **mixer_fields(keys))


def mixer_fields(keys: ConfigKeys) -> dict[str, Any]:
    """Return the fields that say how tokens are mixed, with experts and without."""
    keys.only("hidden_act", "silu", "swish")  # of the MLPs, and of the delta rule's inputs
    head_dim = keys.size("head_dim")
    return {
        "head_dim": head_dim,
        "rope": keys.rope(head_dim, partial=True, part=0.25, sections=(11, 11, 10)),
        "recurrent": recurrent(keys),
        "attention_bias": keys.get("attention_bias", False),
    }


def recurrent(keys: ConfigKeys) -> tuple[RecurrentSpec | None, ...]:
    key_heads, heads = keys.size("linear_num_key_heads", 16), keys.size("linear_num_value_heads", 32)
    key_size, value_size = keys.size("linear_key_head_dim", 128), keys.size("linear_value_head_dim", 128)
    state = RecurrentSpec(
        channels=2 * key_heads * key_size + heads * value_size,
        kernel=keys.size("linear_conv_kernel_dim", 4),
        key_heads=key_heads,
        heads=heads,
        key_size=key_size,
        value_size=value_size,
    )
    layers, interval = keys.size("num_hidden_layers"), keys.size("full_attention_interval", 4)
    default = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)]
    return tuple(
        state if kind == "linear_attention" else None
        for kind in keys.kinds_of_layers(default, "linear_attention", "full_attention")
    )


module = decoder_of("DeltaBlock")


def mixer_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    spec, prefix, E = config.states[layer], f"model.layers.{layer}", config.hidden_size
    if spec is None:
        H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (2 * H * D, K * D, K * D)
        role = column(Span(2 * H * D, H), *heads(H, K, D)[1:])
        names = tuple(f"{prefix}.self_attn.{x}_proj" for x in "qkv")
        sources = {
            "attention.qkv.weight": Source(names=tuple(f"{name}.weight" for name in names), rows=rows, role=role),
            "attention.out.weight": one(f"{prefix}.self_attn.o_proj.weight", E, role=row(H * D)),
            **qk_norm_sources(config, layer, add=1.0),
        }
        if config.qkv_bias:
            sources["attention.qkv.bias"] = Source(names=tuple(f"{name}.bias" for name in names), rows=rows, role=role)
            sources["attention.out.bias"] = one(f"{prefix}.self_attn.o_proj.bias", E)
        return sources
    prefix, inner = f"{prefix}.linear_attn", spec.heads * spec.value_size
    keys, values, steps = recurrent_spans(spec.key_heads, spec.heads, spec.key_size, spec.value_size)
    return {
        "attention.inputs.weight": Source(
            names=tuple(f"{prefix}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
            rows=(spec.channels, inner, spec.heads, spec.heads),
            role=column(keys, keys, values, values, steps, steps),
        ),
        "attention.convolution": one(f"{prefix}.conv1d.weight", spec.channels, role=column(keys, keys, values)),
        "attention.step_bias": one(f"{prefix}.dt_bias", spec.heads, role=column(steps)),
        "attention.log_rate": one(f"{prefix}.A_log", spec.heads, role=column(steps)),
        "attention.norm.weight": one(f"{prefix}.norm.weight", spec.value_size),
        "attention.out.weight": one(f"{prefix}.out_proj.weight", E, role=row(inner, spec.heads)),
    }


norm_sources = norms_of(add=1.0, attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")


def manifest(config: ModelConfig) -> Manifest:
    mlps = moe_sources if config.moe else mlp_sources
    sources = outer_sources(config, add=1.0) | blocks(config, mixer_sources, norm_sources, mlps)
    return Manifest(sources, fused=FusedExperts() if config.moe else None)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | mixer_keys(model)


def read_moe_gguf(model: GgufModel) -> dict[str, Any]:
    inner = model.integer("expert_feed_forward_length")
    shared = model.integer("expert_shared_feed_forward_length")
    own = {"moe_intermediate_size": inner, "shared_expert_intermediate_size": shared}
    return model.decoder(length=inner) | mixer_keys(model) | model.experts(size=None) | own


def mixer_keys(model: GgufModel) -> dict[str, Any]:
    """Return the keys that say how tokens are mixed, with experts and without."""
    heads = model.integer("ssm.time_step_rank")
    recurs = [model.has(f"blk.{layer}.ssm_a") for layer in range(model.layers)]
    attends = recurs.index(False) if False in recurs else 0
    return model.rope(theta=10_000_000.0) | {
        "linear_num_key_heads": model.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": model.integer("ssm.state_size"),
        "linear_value_head_dim": model.integer("ssm.inner_size") // max(1, heads),
        "linear_conv_kernel_dim": model.integer("ssm.conv_kernel"),
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurs],
        "attention_bias": model.has(f"blk.{attends}.attn_q.bias"),
    }


def rewritten(config: ModelConfig, layer: int, name: str) -> TensorRewrite | None:
    """Return how llama.cpp stores the delta rule: heads of values in turn, one of each head of keys."""
    spec, (module, _, own) = config.states[layer], name.partition(".")
    if spec is None or module != "linear_attn":
        return None
    groups, heads, size = spec.key_heads, spec.heads, spec.value_size

    def order(first: int, size: int) -> HeadOrder | None:
        return None if groups == heads else HeadOrder(first, groups, heads, size)

    values, each, mixed = order(0, size), order(0, 1), order(2 * groups * spec.key_size, size)
    return {
        "in_proj_qkv.weight": TensorRewrite(rows=mixed),
        "in_proj_z.weight": TensorRewrite(rows=values),
        "in_proj_a.weight": TensorRewrite(rows=each),
        "in_proj_b.weight": TensorRewrite(rows=each),
        "conv1d.weight": TensorRewrite((spec.channels, 1, spec.kernel), rows=mixed),
        "A_log": TensorRewrite((heads,), rows=each, logarithm=True),
        "dt_bias": TensorRewrite((heads,), rows=each),
        "out_proj.weight": TensorRewrite(columns=values),
    }.get(own)


NAMES = {
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "post_attention_layernorm": "post_attention_norm",
}  # fmt: skip
TENSORS = {"linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.A_log": "ssm_a"}
GGUF = GgufForm(
    architecture="qwen35",
    read=read_gguf,
    names=NAMES,
    tensors=TENSORS,
    rewritten=rewritten,
    reads_only="rekindle does not write states' matrices",
)
MOE_GGUF = dataclasses.replace(GGUF, architecture="qwen35moe", read=read_moe_gguf)
FAMILIES = {
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", config, module, manifest, gguf=GGUF),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", moe_config, module, manifest, gguf=MOE_GGUF),
}
