"""LFM2 and LFM2.5: short convolutions in most layers, and attention with norms of q and k in the others.

8B-A1B has experts in all but the first layers, chosen with a correction. LFM3 has norms after both halves of a block, a
window in some layers, and a gate for each head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rekindle._src.models.config import AttentionSpec, ModelConfig, RecurrentSpec
from rekindle._src.models.families import llama
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.gguf.rewrites import TensorRewrite
from rekindle._src.models.loading.manifest import Source, one
from rekindle._src.models.roles import Span, column, heads, row

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


def config(keys: ConfigKeys) -> ModelConfig:
    return decoder(keys, intermediate_size=_intermediate_size(keys), **mixer_fields(keys))


def moe_config(keys: ConfigKeys) -> ModelConfig:
    experts = keys.experts(
        normalize=keys.get("norm_topk_prob", True),
        epsilon=1e-6,
        scoring="sigmoid",
        correction=keys.get("use_expert_bias", True),
        scale=float(keys.get("routed_scaling_factor", 1.0)),
    )
    layers, dense = range(keys.size("num_hidden_layers")), keys.whole("num_dense_layers", 2)
    return decoder(keys, moe=tuple(None if layer < dense else experts for layer in layers), **mixer_fields(keys))


def config3(keys: ConfigKeys) -> ModelConfig:
    keys.only("conv_bias", False)
    keys.only("use_sandwich_norm", True)
    keys.only("use_attention_gate", True)
    keys.raw.setdefault("rope_parameters", ROPES)
    hidden, layers, head_dim = keys.size("hidden_size"), keys.size("num_hidden_layers"), keys.size("head_dim")
    state = RecurrentSpec(channels=hidden, kernel=keys.size("conv_L_cache", 7))
    default = [
        "full_attention" if layer % 4 == 2 else "sliding_attention" if layer % 4 == 0 and layer > 0 else "conv"
        for layer in range(layers)
    ]
    kinds = keys.kinds_of_layers(default, "conv", "full_attention", "sliding_attention")
    everywhere, nearby = (
        AttentionSpec(scale=head_dim**-0.5, sliding_window=window, rope=keys.rope(head_dim, layer_type=kind))
        for kind, window in (("full_attention", None), ("sliding_attention", keys.window(256)))
    )
    return decoder(
        keys,
        norm_eps=keys.get("norm_eps", 1e-5),
        tie=True,
        activation="silu",
        attention_bias=keys.get("attention_bias", False),
        attention=tuple(nearby if kind == "sliding_attention" else everywhere for kind in kinds),
        recurrent=tuple(state if kind == "conv" else None for kind in kinds),
    )


def mixer_fields(keys: ConfigKeys) -> dict[str, Any]:
    """Return the fields that do not depend on the MLPs."""
    keys.only("conv_bias", False)
    hidden, layers = keys.size("hidden_size"), keys.size("num_hidden_layers")
    state = RecurrentSpec(channels=hidden, kernel=keys.size("conv_L_cache", 3))
    attends = frozenset(keys.get("full_attn_idxs", range(layers)))
    default = ["full_attention" if layer in attends else "conv" for layer in range(layers)]
    return {
        "norm_eps": keys.get("norm_eps", 1e-5),
        "tie_embeddings": keys.get("tie_embedding", keys.get("tie_word_embeddings", True)),
        "activation": "silu",
        "rope": keys.rope(keys.head_dim, theta=1_000_000.0),
        "recurrent": tuple(
            state if kind == "conv" else None for kind in keys.kinds_of_layers(default, "conv", "full_attention")
        ),
    }


def _intermediate_size(keys: ConfigKeys) -> int:
    size = keys.size("intermediate_size" if keys.get("block_ff_dim") is None else "block_ff_dim")
    if not keys.get("block_auto_adjust_ff_dim", True):
        return size
    multiple = keys.size("block_multiple_of", 256)
    size = int(keys.factor("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


module, module3 = decoder_of("ConvolutionBlock"), decoder_of("ConvolutionSandwichBlock")


def mixer_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    spec, prefix, E = config.states[layer], f"model.layers.{layer}", config.hidden_size
    if spec is not None:
        return {
            "attention.inputs.weight": one(f"{prefix}.conv.in_proj.weight", 3 * E, role=column(*[Span(E)] * 3)),
            "attention.convolution": one(f"{prefix}.conv.conv.weight", E, role=column(Span(E))),
            "attention.out.weight": one(f"{prefix}.conv.out_proj.weight", E, role=row(E)),
        }
    H, K = config.num_heads, config.num_kv_heads
    names, role = tuple(f"{prefix}.self_attn.{x}_layernorm.weight" for x in "qk"), column(*heads(H, K, 1)[:2])
    norm = Source(names=names, rows=(H, K), tiled=True, role=role)
    out = one(f"{prefix}.self_attn.out_proj.weight", E, role=row(H * config.head_dim))
    return llama.attention_sources(config, layer) | {"attention.out.weight": out, "attention.qk_norm.weight": norm}


def mixer_sources3(config: ModelConfig, layer: int) -> dict[str, Source]:
    if config.states[layer] is not None:
        return mixer_sources(config, layer)
    heads, name = config.num_heads, f"model.layers.{layer}.self_attn.gate_proj.weight"
    gate = {"attention.gate.weight": one(name, heads, role=column(Span(heads, heads)))}
    return llama.attention_sources(config, layer) | llama.qk_norm_sources(config, layer) | gate


norm_sources = llama.norms_of(attention_norm="operator_norm", mlp_norm="ffn_norm")
sandwich_sources = llama.norms_of(attention_out_norm="post_operator_norm", mlp_out_norm="post_ffn_norm")
mlp_sources = llama.mlp_of("feed_forward", "w1", "w3", "w2")


def moe_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, spec = f"model.layers.{layer}.feed_forward", config.moe[layer]
    if spec is None:
        return mlp_sources(config, layer)
    sources = llama.expert_sources(config, layer, f"{prefix}.gate", f"{prefix}.experts", ("w1", "w3", "w2"))
    if spec.correction:
        sources["mlp.correction"] = one(f"{prefix}.expert_bias", spec.num_experts)
    return sources


NORM = "model.embedding_norm"
manifest = llama.manifest_of(mixer_sources, norm_sources, mlp_sources, norm=NORM)
moe_manifest = llama.manifest_of(mixer_sources, norm_sources, moe_sources, norm=NORM)
manifest3 = llama.manifest_of(mixer_sources3, norm_sources, sandwich_sources, mlp_sources, norm=NORM)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return mixer_keys(model) | {"block_auto_adjust_ff_dim": False}


def read_moe_gguf(model: GgufModel) -> dict[str, Any]:
    model.only("expert_gating_func", 2)  # sigmoid
    dense = model.integer("leading_dense_block_count", 0)
    return mixer_keys(model) | {
        **model.experts(),
        "num_dense_layers": dense,
        "use_expert_bias": model.has(f"blk.{dense}.exp_probs_b.bias"),
        "norm_topk_prob": True,  # known by the architecture
        "routed_scaling_factor": model.number("expert_weights_scale", 1.0),
    }


def mixer_keys(model: GgufModel) -> dict[str, Any]:
    keys = model.decoder("layer_norm_rms_epsilon", "leading_dense_block_count", gaps=True)
    return (
        keys
        | model.rope(theta=1_000_000.0)
        | {
            "norm_eps": keys["rms_norm_eps"],
            "tie_embedding": keys["tie_word_embeddings"],
            "conv_L_cache": model.integer("shortconv.l_cache"),
            "layer_types": ["full_attention" if attends else "conv" for attends in model.attends()],
        }
    )


def rewritten(config: ModelConfig, layer: int, name: str) -> TensorRewrite | None:
    spec = config.states[layer]
    return TensorRewrite((spec.channels, 1, spec.kernel)) if spec is not None and name == "conv.conv.weight" else None


GGUF = GgufForm(
    architecture="lfm2",
    read=read_gguf,
    names={
        "conv.in_proj": "shortconv.in_proj", "conv.conv": "shortconv.conv", "conv.out_proj": "shortconv.out_proj",
        "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
        "self_attn.out_proj": "attn_output", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
        "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
        "feed_forward.gate": "ffn_gate_inp",
    },
    tensors={"feed_forward.expert_bias": "exp_probs_b.bias"},
    rewritten=rewritten,
    reads_only="rekindle does not write states' matrices",
)  # fmt: skip
MOE_GGUF = dataclasses.replace(GGUF, architecture="lfm2moe", read=read_moe_gguf)
ALIASES3 = {"rms_norm_eps": "norm_eps"}
FAMILIES = {
    "lfm2": Family("Lfm2ForCausalLM", config, module, manifest, gguf=GGUF),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", moe_config, module, moe_manifest, gguf=MOE_GGUF),
    "lfm3": Family("Lfm3ForCausalLM", config3, module3, manifest3, ALIASES3),
}
