"""Ling 3: Kimi's delta rule in most layers, gated attention over latent pages in the others, experts in groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rekindle._src.models.config import ModelConfig, RecurrentSpec
from rekindle._src.models.families import deepseek_v2, llama
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ConfigKeys
from rekindle._src.models.loading.gguf.rewrites import TensorRewrite
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.roles import column, recurrent_spans, row
from rekindle.errors import UnsupportedModel

KINDS = ("linear_attention", "full_attention")


def config(keys: ConfigKeys) -> ModelConfig:
    keys.only("hidden_act", "silu", "swish")  # of the MLPs, and of the delta rule's inputs
    keys.only("no_kda_lora", True)
    keys.only("gated_attention_proj_granularity_type", "head_wise")
    keys.only("score_function", "sigmoid")
    for name, only in {"use_mla_nope": False, "use_qkv_bias": False, "rope_interleave": True}.items():
        keys.only(name, only)
    for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        if any(keys.get(name) or ()):
            raise UnsupportedModel(f"{name} is not implemented for {keys.raw['model_type']}. Open another model.")
    layers, inner = keys.size("num_hidden_layers"), keys.size("moe_intermediate_size")
    experts = keys.experts(
        "num_experts",
        normalize=keys.get("norm_topk_prob", True),
        epsilon=1e-20,
        scoring="sigmoid",
        correction=True,
        scale=float(keys.get("routed_scaling_factor", 2.5)),
        groups=keys.size("n_group", 8),
        top_groups=keys.size("topk_group", 4),
        shared_size=keys.size("moe_shared_expert_intermediate_size", inner) * keys.whole("n_shared_experts", 1),
    )
    dense = keys.whole("first_k_dense_replace", 2)
    default = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    mlps = keys.kinds_of_layers(default, "dense", "sparse", name="mlp_layer_types")
    moe = tuple(experts if kind == "sparse" else None for kind in mlps)
    # transformers saves the size of the delta rule's heads as `linear_head_dim`, and the rotated size as `head_dim`.
    size, heads = keys.size("linear_head_dim", keys.size("head_dim", 128)), keys.size("num_attention_heads")
    state = RecurrentSpec(
        channels=3 * heads * size,
        kernel=keys.size("short_conv_kernel_size", 4),
        key_heads=heads,
        heads=heads,
        key_size=size,
        value_size=size,
        decay_bound=float(keys.get("kda_lower_bound", -5.0)) if keys.get("kda_safe_gate", True) else None,
    )
    found = deepseek_v2.latent_decoder(without_parts(keys), moe, query_rank=None, theta=6_000_000.0)
    assert found.latent is not None, "the family has latent pages"
    recurrent = tuple(state if kind == KINDS[0] else None for kind in kinds_of_layers(keys, layers))
    return dataclasses.replace(
        found,
        latent=dataclasses.replace(found.latent, gated_heads=True),
        recurrent=recurrent,
        pages=tuple(None if state else pages for state, pages in zip(recurrent, found.pages, strict=True)),
    )


def without_parts(keys: ConfigKeys) -> ConfigKeys:
    """Return the keys without the rotated part of heads, which `qk_rope_head_dim` says here, as in transformers."""
    name, raw = "partial_rotary_factor", keys.raw
    ropes = {key: raw[key] for key in ("rope_parameters", "rope_scaling") if isinstance(raw.get(key), Mapping)}
    inner = {key: {own: value for own, value in rope.items() if own != name} for key, rope in ropes.items()}
    return ConfigKeys({key: value for key, value in raw.items() if key != name} | inner)


def kinds_of_layers(keys: ConfigKeys, layers: int) -> tuple[str, ...]:
    """Return the kind of each layer: the last one of each group attends, and so do layers that fill no group."""
    group = keys.size("layer_group_size", 6)
    default = [KINDS[(layer + 1) % group == 0 or layer >= layers // group * group] for layer in range(layers)]
    return keys.kinds_of_layers(default, *KINDS)


module = decoder_of("ChannelDeltaBlock")


def mixer_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    spec, prefix = config.states[layer], f"model.layers.{layer}.attention"
    if spec is None:
        return attention_sources(config, layer)
    inner, E = spec.heads * spec.value_size, config.hidden_size
    keys, values, each = recurrent_spans(spec.heads, spec.heads, spec.key_size, spec.value_size)
    sizes = (inner, inner, inner, inner, inner, spec.heads)
    return {
        "attention.inputs.weight": Source(
            names=tuple(f"{prefix}.{part}_proj.weight" for part in "qkvgfb"),
            rows=sizes,
            role=column(keys, keys, values, values, keys, each),
        ),
        "attention.convolution": Source(
            names=tuple(f"{prefix}.{part}_conv1d.weight" for part in "qkv"),
            rows=sizes[:3],
            role=column(keys, keys, values),
        ),
        "attention.step_bias": one(f"{prefix}.dt_bias", inner, role=column(keys)),
        "attention.log_rate": one(f"{prefix}.A_log", spec.heads, role=column(each)),
        "attention.norm.weight": one(f"{prefix}.o_norm.weight", spec.value_size),
        "attention.out.weight": one(f"{prefix}.o_proj.weight", E, role=row(inner, spec.heads)),
    }


def attention_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    """Return the sources of attention, with its output projection and its gate under their own names."""
    ours, theirs = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.attention."
    sources = {
        path: source.renamed(f"{ours}o_proj.", f"{theirs}dense.").renamed(ours, theirs)
        for path, source in deepseek_v2.attention_sources(config, layer).items()
    }
    heads = recurrent_spans(1, config.num_heads, 1, 1)[2]
    return sources | {"attention.gate.weight": one(f"{theirs}g_proj.weight", config.num_heads, role=column(heads))}


def mlp_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    gate = f"model.layers.{layer}.mlp.gate."
    return {
        path: source.renamed(f"{gate}e_score_correction_bias", f"{gate}expert_bias")
        for path, source in deepseek_v2.mlp_sources(config, layer).items()
    }


def manifest(config: ModelConfig) -> Manifest:
    sources = llama.outer_sources(config) | llama.blocks(config, mixer_sources, llama.norm_sources, mlp_sources)
    others = {
        f"model.layers.{layer}.attention.{ends[state is None]}.weight": f"model.layers.{layer}.attention.{name}.weight"
        for layer, state in enumerate(config.states)
        for name, ends in [("dense" if state is None else "o_proj", ("dense", "o_proj"))]
    }
    names = [name.removesuffix(".weight") for source in sources.values() for name in source.names]
    modules = {name: module_name(name) for name in names if ".attention." in name}
    return Manifest({path: renamed(source) for path, source in sources.items()}, others=others, modules=modules)


def module_name(name: str) -> str:
    """Return transformers' name of a module of the checkpoint."""
    before, _, own = name.partition(".attention.")
    own = {"dense": "o_proj", "f_proj": "forget_gate.f_proj"}.get(own, own)
    return f"{before}.self_attn.{own}"


def renamed(source: Source) -> Source:
    """Return a source with the embedding's own name."""
    return source.renamed("model.embed_tokens.", "model.word_embeddings.")


def read_gguf(model: GgufModel) -> dict[str, Any]:
    model.only("expert_gating_func", 2)
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        if model.get(key) is not None and model.numbers(key).any():
            raise model.unsupported(key, model.numbers(key).tolist())
    keys, shared = deepseek_v2.latent_keys(model), model.integer("expert_shared_feed_forward_length")
    return keys | {
        "head_dim": model.integer("kda.head_dim"),
        "short_conv_kernel_size": model.integer("ssm.conv_kernel"),
        "kda_safe_gate": bool(model.get("kda.safe_gate", True)),
        "kda_lower_bound": model.number("kda.gate_lower_bound"),
        "layer_types": [KINDS[attends] for attends in model.attends()],
        **model.experts(),
        "moe_shared_expert_intermediate_size": shared // (keys["n_shared_experts"] or 1),
        "n_group": model.integer("expert_group_count", 1) or 1,
        "topk_group": model.integer("expert_group_used_count", 1) or 1,
    }


def rewritten(config: ModelConfig, layer: int, name: str) -> TensorRewrite | None:
    """Return how llama.cpp stores the convolutions and rates of the delta rule."""
    spec, (module, _, own) = config.states[layer], name.partition(".")
    if spec is None or module != "attention":
        return None
    convolution = TensorRewrite((spec.heads * spec.key_size, 1, spec.kernel))
    rates = TensorRewrite((spec.heads,), logarithm=True, negative=False)
    return {**{f"{part}_conv1d.weight": convolution for part in "qkv"}, "A_log": rates}.get(own)


NAMES = {
    **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"attention.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{name.replace("self_attn.", "attention."): theirs for name, theirs in deepseek_v2.NAMES.items()},
    "attention.f_proj": "ssm_f_a", "attention.g_proj": "ssm_g_a", "attention.b_proj": "ssm_beta",
    "attention.o_norm": "ssm_norm", "attention.o_proj": "attn_output", "attention.dense": "attn_output",
    "final_layernorm": "layer_output_norm",
}  # fmt: skip
TENSORS = {
    "attention.dt_bias": "ssm_dt.bias",
    "attention.A_log": "ssm_a",
    "mlp.gate.expert_bias": "exp_probs_b.bias",
}
GGUF = GgufForm(
    architecture="bailingmoe3",
    read=read_gguf,
    names=NAMES,
    tensors=TENSORS,
    rewritten=rewritten,
    joined=lambda config: {"attention.g_proj.weight": ("attn_gate.weight",)},  # of attention, not of the delta rule
    reads_only="rekindle does not write states' matrices",
)
ALIASES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
FAMILIES = {"bailing_hybrid": Family("BailingHybridForCausalLM", config, module, manifest, ALIASES, GGUF)}
