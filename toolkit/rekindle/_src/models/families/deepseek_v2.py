"""DeepSeek-V2 and V2-Lite: attention over latent pages, and from a layer on experts alongside a shared MLP.

GLM-4.7-Flash is the same with experts that are chosen with a correction.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rekindle._src.models.config import AttentionSpec, LatentSpec, ModelConfig, MoeSpec, Pages
from rekindle._src.models.families import llama
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.roles import Span, column, row


def config(keys: ConfigKeys) -> ModelConfig:
    keys.only("topk_method", "greedy", "group_limited_greedy")
    keys.only("norm_topk_prob", False)  # transformers does not read it
    keys.only("mlp_bias", False)
    inner, layers = keys.size("moe_intermediate_size"), keys.size("num_hidden_layers")
    limited = keys.get("topk_method", "greedy") == "group_limited_greedy"
    spec = keys.experts(
        "n_routed_experts",
        normalize=False,
        scale=float(keys.get("routed_scaling_factor", 1.0)),
        shared_size=inner * keys.whole("n_shared_experts", 2),
        groups=keys.size("n_group", 1) if limited else 1,
        top_groups=keys.size("topk_group", 1) if limited else 1,
        group_best=1,
    )
    dense = keys.whole("first_k_dense_replace", 0)
    return latent_decoder(keys, tuple(None if layer < dense else spec for layer in range(layers)))


def glm_config(keys: ConfigKeys) -> ModelConfig:
    inner, layers = keys.size("moe_intermediate_size"), keys.size("num_hidden_layers")
    spec = keys.experts(
        "n_routed_experts",
        normalize=keys.get("norm_topk_prob", True),
        scoring="sigmoid",
        correction=True,
        scale=float(keys.get("routed_scaling_factor", 1.8)),
        groups=keys.size("n_group", 1),
        top_groups=keys.size("topk_group", 1),
        shared_size=inner * keys.whole("n_shared_experts", 1),
    )
    dense = keys.whole("first_k_dense_replace", 1)
    default = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    kinds = keys.kinds_of_layers(default, "dense", "sparse", name="mlp_layer_types")
    moe = tuple(spec if kind == "sparse" else None for kind in kinds)
    interleaved = keys.get("rope_interleave", True)
    return latent_decoder(keys, moe, query_rank=768, interleaved=interleaved, eps=1e-5)


def latent_decoder(
    keys: ConfigKeys,
    moe: tuple[MoeSpec | None, ...],
    *,
    query_rank: int | None = 1536,
    interleaved: bool = True,
    theta: float = 10_000.0,
    **options: Any,
) -> ModelConfig:
    """Return the config of a decoder over latent pages; `options` as in `decoder`."""
    spec = LatentSpec(
        query_rank=keys.size("q_lora_rank") if keys.nullable("q_lora_rank", query_rank) else None,
        plain_size=keys.size("qk_nope_head_dim"),
        rotated_size=keys.size("qk_rope_head_dim"),
        value_size=keys.size("v_head_dim"),
        rank=keys.size("kv_lora_rank"),
    )
    rope = keys.rope(spec.rotated_size, theta=theta, interleaved=interleaved)
    pages = Pages(1, spec.rank + spec.rotated_size, spec.rank)
    layers = keys.size("num_hidden_layers")
    attention = AttentionSpec(scale=_scale(keys, spec), rope=rope)
    found = decoder(
        keys,
        kv_heads_implied=True,
        num_kv_heads=pages.heads,
        attention=(attention,) * layers,
        pages=(pages,) * layers,
        latent=spec,
        moe=moe,
        attention_bias=keys.get("attention_bias", False),
        **options,
    )
    return dataclasses.replace(found, head_dim=pages.key_size)


def _scale(keys: ConfigKeys, spec: LatentSpec) -> float:
    """Return the scale of scores, which grows with a stretched rope."""
    scale = float((spec.plain_size + spec.rotated_size) ** -0.5)
    options = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    stretched = options.get("rope_type", options.get("type", "default")) != "default"
    factor, growth = float(options.get("factor") or 1.0), options.get("mscale_all_dim") or 0
    if stretched and growth and factor > 1:
        scale *= (0.1 * growth * math.log(factor) + 1.0) ** 2
    return scale


module = decoder_of("LatentBlock")


def attention_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, spec, H = f"model.layers.{layer}.self_attn", config.latent, config.num_heads
    assert spec is not None, "the family has latent pages"
    queries, kept = H * (spec.plain_size + spec.rotated_size), spec.rank + spec.rotated_size
    names = ("q_proj" if spec.query_rank is None else "q_a_proj", "kv_a_proj_with_mqa")
    rows = (spec.query_rank or queries, kept)
    role = column(Span(rows[0], 1 if spec.query_rank else H), Span(kept, 1))
    made = H * (spec.plain_size + spec.value_size)
    sources = {
        "attention.inputs.weight": Source(names=tuple(f"{prefix}.{x}.weight" for x in names), rows=rows, role=role),
        "attention.norm.weight": one(f"{prefix}.kv_a_layernorm.weight", spec.rank),
        "attention.up": one(f"{prefix}.kv_b_proj.weight", made, role=column(Span(made, H))),
        "attention.out.weight": one(f"{prefix}.o_proj.weight", config.hidden_size, role=row(H * spec.value_size, H)),
    }
    if spec.query_rank is not None:
        sources |= {
            "attention.query_norm.weight": one(f"{prefix}.q_a_layernorm.weight", spec.query_rank),
            "attention.query.weight": one(f"{prefix}.q_b_proj.weight", queries, role=column(Span(queries, H))),
        }
    if config.qkv_bias:
        sources["attention.inputs.bias"] = Source(
            names=tuple(f"{prefix}.{x}.bias" for x in names), rows=rows, role=role
        )
        sources["attention.out.bias"] = one(f"{prefix}.o_proj.bias", config.hidden_size)
    return sources


def mlp_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, spec = f"model.layers.{layer}.mlp", config.moe[layer]
    sources = llama.usual_expert_sources(config, layer) | llama.shared_sources(
        config, layer, f"{prefix}.shared_experts"
    )
    if spec is not None and spec.correction:
        sources["mlp.correction"] = one(f"{prefix}.gate.e_score_correction_bias", spec.num_experts)
    return sources


def manifest(config: ModelConfig) -> Manifest:
    return Manifest(
        llama.outer_sources(config) | llama.blocks(config, attention_sources, llama.norm_sources, mlp_sources)
    )


def gguf_variant(model: GgufModel) -> str | None:
    """Return the other family of a file of llama.cpp's "deepseek2" if its experts have a correction."""
    layers = range(model.layers)
    return "glm4_moe_lite" if any(model.has(f"blk.{layer}.exp_probs_b.bias") for layer in layers) else None


def read_gguf(model: GgufModel) -> dict[str, Any]:
    model.only("expert_group_count", 0, 1)
    return latent_keys(model) | model.experts("n_routed_experts")


def latent_keys(model: GgufModel) -> dict[str, Any]:
    """Return the keys of a decoder over latent pages, without the experts."""
    rank, rotated = model.integer("attention.kv_lora_rank"), model.integer("rope.dimension_count")
    rope = model.rope(head_dim=rotated)
    growth = model.number("rope.scaling.yarn_log_multiplier", None)
    if growth and rope.get("rope_scaling", {}).get("rope_type") == "yarn":
        rope["rope_scaling"] |= {"mscale": 10 * growth, "mscale_all_dim": 10 * growth}
    return {
        "hidden_size": model.integer("embedding_length"),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.integer("attention.head_count"),
        "intermediate_size": model.integer("feed_forward_length"),
        "max_position_embeddings": model.integer("context_length"),
        "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not model.has("output.weight"),
        "q_lora_rank": model.integer("attention.q_lora_rank", None),
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": model.integer("attention.key_length_mla") - rotated,
        "v_head_dim": model.integer("attention.value_length_mla"),
        "n_shared_experts": model.integer("expert_shared_count"),
        "first_k_dense_replace": model.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": model.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(model.get("expert_weights_norm", False)),
        **rope,
    }


NAMES = {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}  # fmt: skip
GGUF = GgufForm(
    architecture="deepseek2",
    read=read_gguf,
    variant=gguf_variant,
    names=NAMES,
    reads_only="rekindle does not write latent pages' matrices",
)
ALIASES = {"num_experts": "n_routed_experts"}
GLM_ALIASES = {"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"}
FAMILIES = {
    "deepseek_v2": Family("DeepseekV2ForCausalLM", config, module, manifest, ALIASES, GGUF),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", glm_config, module, manifest, GLM_ALIASES, GGUF),
}
