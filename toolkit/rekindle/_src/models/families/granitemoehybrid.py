"""Granite 4: Granite 3 with Mamba-2 in most layers or in none, with or without experts alongside each layer's MLP."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rekindle._src.models.config import ModelConfig, RecurrentSpec
from rekindle._src.models.families import granite
from rekindle._src.models.families.llama import attention_sources, manifest_of, norm_sources
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.gguf.rewrites import TensorRewrite
from rekindle._src.models.loading.manifest import Source, one
from rekindle._src.models.roles import column, recurrent_spans, row
from rekindle.errors import UnsupportedModel

KINDS = ("mamba", "attention", "linear_attention", "full_attention")  # older files have the first two


def config(keys: ConfigKeys) -> ModelConfig:
    keys.only("position_embedding_type", "rope", "nope")
    keys.only("mamba_proj_bias", False)
    keys.only("mamba_conv_bias", True)
    shared, layers = keys.size("shared_intermediate_size"), keys.size("num_hidden_layers")
    fields = (
        granite.granite_moe_fields(keys, shared) if keys.whole("num_local_experts", 8) else granite.granite_fields(keys)
    )
    if keys.get("position_embedding_type") != "rope":
        fields["attention"] = tuple(dataclasses.replace(spec, rope=None) for spec in fields["attention"])
    kinds = keys.kinds_of_layers(["linear_attention"] * layers, *KINDS)
    state = state_of(keys) if {"mamba", "linear_attention"} & {*kinds} else None
    if state:
        keys.only("hidden_act", "silu", "swish")  # of the MLPs, and of Mamba-2
    recurrent = tuple(state if kind in ("mamba", "linear_attention") else None for kind in kinds)
    return decoder(
        keys, kv_heads_implied=True, intermediate_size=shared, recurrent=recurrent if state else (), **fields
    )


def check_steps(keys: ConfigKeys) -> None:
    """Raise `UnsupportedModel` for steps of Mamba-2 that are limited."""
    limits = tuple(_number(limit) for limit in keys.get("time_step_limit", (0.0, math.inf)))
    if limits != (0.0, math.inf):
        raise UnsupportedModel(f"time_step_limit={limits!s:.80} is not implemented. Implemented: (0.0, inf).")


def state_of(keys: ConfigKeys, inner: int | None = None) -> RecurrentSpec:
    """Return the state of Mamba-2 layers of `inner` channels, or of as many as `mamba_expand` makes."""
    check_steps(keys)
    inner = inner or int(keys.factor("mamba_expand", 2) * keys.size("hidden_size"))
    heads = keys.size("mamba_n_heads", 128)
    groups, size = keys.size("mamba_n_groups", 1), keys.size("mamba_d_state", 256)
    return RecurrentSpec(
        channels=inner + 2 * groups * size,
        kernel=keys.size("mamba_d_conv", 4),
        key_heads=groups,
        heads=heads,
        key_size=size,
        value_size=inner // heads,
    )


def _number(value: Any) -> float:
    """Return a number, which transformers writes as an object where JSON has none, such as infinity."""
    return float(value["__float__"] if isinstance(value, Mapping) else value)


module = decoder_of("StateSpaceBlock")


def mixer_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    spec = config.states[layer]
    if spec is None:
        return attention_sources(config, layer)
    return state_sources(spec, config.hidden_size, "attention", f"model.layers.{layer}.mamba")


def state_sources(spec: RecurrentSpec, hidden: int, module: str, prefix: str) -> dict[str, Source]:
    """Return the sources of Mamba-2, of `module` within its layer; `prefix` is the checkpoint's."""
    inner = spec.heads * spec.value_size
    keys, values, steps = recurrent_spans(spec.key_heads, spec.heads, spec.key_size, spec.value_size)
    of_inputs, of_channels = column(values, values, keys, keys, steps), column(values, keys, keys)
    norm = {f"{module}.norm.weight": one(f"{prefix}.norm.weight", inner, role=column(values))} if spec.normed else {}
    return norm | {
        f"{module}.inputs.weight": one(f"{prefix}.in_proj.weight", inner + spec.channels + spec.heads, role=of_inputs),
        f"{module}.convolution": one(f"{prefix}.conv1d.weight", spec.channels, role=of_channels),
        f"{module}.convolution_bias": one(f"{prefix}.conv1d.bias", spec.channels, role=of_channels),
        f"{module}.step_bias": one(f"{prefix}.dt_bias", spec.heads, role=column(steps)),
        f"{module}.log_rate": one(f"{prefix}.A_log", spec.heads, role=column(steps)),
        f"{module}.skip": one(f"{prefix}.D", spec.heads, role=column(steps)),
        f"{module}.out.weight": one(f"{prefix}.out_proj.weight", hidden, role=row(inner, spec.heads)),
    }


def mlp_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    if config.moe:
        return granite.fused_expert_sources(config, layer)
    return granite.shared_mlp(config, layer, "mlp", config.intermediate_size)


manifest = manifest_of(mixer_sources, norm_sources, mlp_sources)


def state_names(prefix: str) -> dict[str, str]:
    """Return llama.cpp's names of the modules of Mamba-2."""
    names = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"}
    return {f"{prefix}.{name}": theirs for name, theirs in names.items()}


def state_tensors(prefix: str) -> dict[str, str]:
    """Return llama.cpp's names of its other tensors."""
    names = {"dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d"}
    return {f"{prefix}.{name}": theirs for name, theirs in names.items()}


def rewritten_state(config: ModelConfig, layer: int, name: str) -> TensorRewrite | None:
    """Return how llama.cpp stores the tensors of Mamba-2."""
    spec, (_, _, end) = config.states[layer], name.partition(".")
    if spec is None:
        return None
    heads = (spec.heads,)
    return {
        "conv1d.weight": TensorRewrite((spec.channels, 1, spec.kernel)),
        "norm.weight": TensorRewrite((spec.heads * spec.value_size,)),
        "A_log": TensorRewrite(heads, logarithm=True),
        "D": TensorRewrite(heads),
    }.get(end)


def gguf_state(model: GgufModel) -> dict[str, Any]:
    """Return the keys of Mamba-2 that a file has."""
    count, inner = model.integer("ssm.time_step_rank"), model.integer("ssm.inner_size")
    return {
        "mamba_n_heads": count,
        "mamba_d_head": inner // max(1, count),
        "mamba_n_groups": model.integer("ssm.group_count"),
        "mamba_d_state": model.integer("ssm.state_size"),
        "mamba_d_conv": model.integer("ssm.conv_kernel"),
    }


def read_gguf(model: GgufModel) -> dict[str, Any]:
    keys = model.decoder(gaps=True) | granite.gguf_factors(model) | gguf_state(model)
    count = model.integer("expert_count", 0)
    shared = model.integer("expert_shared_feed_forward_length", keys["intermediate_size"])
    kinds = ["full_attention" if attends else "linear_attention" for attends in model.attends()]
    return keys | {
        "mamba_expand": model.integer("ssm.inner_size") / keys["hidden_size"],
        "layer_types": kinds,
        "position_embedding_type": "rope" if model.get("rope.scaling.finetuned", False) else "nope",
        "num_local_experts": count,
        "num_experts_per_tok": model.integer("expert_used_count", 0),
        "shared_intermediate_size": shared,
        "rope_theta": model.number("rope.freq_base", 10_000.0),
    }


def joined(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    end = "_shexp.weight" if config.moe else ".weight"
    return {
        "block_sparse_moe.input_linear.weight": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        "shared_mlp.input_linear.weight": (f"ffn_gate{end}", f"ffn_up{end}"),
        "shared_mlp.output_linear.weight": (f"ffn_down{end}",),
    }


NAMES = {
    **state_names("mamba"), "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.input_linear": "ffn_gate_exps", "block_sparse_moe.output_linear": "ffn_down_exps",
    "shared_mlp.input_linear": "ffn_gate", "shared_mlp.output_linear": "ffn_down",
}  # fmt: skip
GGUF = GgufForm(
    architecture="granitehybrid",
    read=read_gguf,
    names=NAMES,
    tensors=state_tensors("mamba"),
    rewritten=lambda config, layer, name: rewritten_state(config, layer, name) if name.startswith("mamba.") else None,
    joined=joined,
    paired=True,
    reads_only="rekindle does not write states' matrices",
)
ALIASES = {"layers_block_type": "layer_types"}
FAMILIES = {"granitemoehybrid": Family("GraniteMoeHybridForCausalLM", config, module, manifest, ALIASES, GGUF)}
