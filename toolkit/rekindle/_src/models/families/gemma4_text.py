"""Gemma 4 (text): wider heads in full layers, layers that share pages, embeddings of layers, experts alongside an MLP.

The 12B model has neither embeddings of layers nor experts; its model of images has no tower.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from rekindle._src.models.config import AttentionSpec, ModelConfig, Pages, SharedWith
from rekindle._src.models.families.gemma2 import NORMS, POST_NORMED, gemma_fields
from rekindle._src.models.families.llama import blocks, expert_sources, mlp_sources, norms_of, outer_sources
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import FusedExperts, Manifest, Source, one
from rekindle._src.models.roles import column, heads, row, vocab

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
EXPERT_NORMS = {
    "dense_out_norm": "post_feedforward_layernorm_1", "experts_norm": "pre_feedforward_layernorm_2",
    "experts_out_norm": "post_feedforward_layernorm_2",
}  # fmt: skip


class LayerKinds(NamedTuple):
    """Per layer: True if it has a window, its attention, and the pages that it has or attends to."""

    slides: tuple[bool, ...]
    attention: tuple[AttentionSpec, ...]
    pages: tuple[Pages, ...]


def kinds_of_layers(keys: ConfigKeys) -> LayerKinds:
    keys.only("use_bidirectional_attention", "vision")  # of images, which are not read
    layers = keys.size("num_hidden_layers")
    slides = (*keys.layer_types([(layer + 1) % 6 != 0 for layer in range(layers)])[:-1], False)
    head_dim, kv_heads, window = keys.size("head_dim"), keys.size("num_key_value_heads"), keys.window(512)
    full_dim, full_heads = _full_layers(keys, kv_heads)
    ropes = ConfigKeys({**keys.raw, "rope_parameters": keys.get("rope_parameters", ROPES)})
    nearby = AttentionSpec(scale=1.0, sliding_window=window, rope=ropes.rope(head_dim, layer_type="sliding_attention"))
    everywhere = AttentionSpec(
        scale=1.0,
        rope=ropes.rope(full_dim, layer_type="full_attention"),
        keys_as_values=keys.get("attention_k_eq_v", False),
    )
    narrow, wide = Pages(kv_heads, head_dim, head_dim), Pages(full_heads, full_dim, full_dim)
    return LayerKinds(
        slides,
        tuple(nearby if slide else everywhere for slide in slides),
        tuple(narrow if slide else wide for slide in slides),
    )


def config(keys: ConfigKeys) -> ModelConfig:
    layers, (slides, attention, own) = keys.size("num_hidden_layers"), kinds_of_layers(keys)
    shared = keys.whole("num_kv_shared_layers", 0, most=layers - 1)
    first = layers - shared
    sources = {slide: max(layer for layer in range(first) if slides[layer] == slide) for slide in set(slides[first:])}
    pages = (*own[:first], *(SharedWith(sources[slide]) for slide in slides[first:]))
    inner = keys.size("intermediate_size")
    wide = 2 if keys.get("use_double_wide_mlp", False) else 1
    size = keys.whole("hidden_size_per_layer_input", 256, null=0)
    has_experts = keys.get("enable_moe_block", False)
    if size:
        keys.only("vocab_size_per_layer_input", keys.size("vocab_size"))
    return decoder(
        keys,
        attention=attention,
        pages=pages,
        mlp_sizes=(inner,) * first + (wide * inner,) * shared if wide > 1 and shared else (),
        layer_embedding=size,
        moe=(keys.experts(of_token="top_k_experts", normalize=True),) * layers if has_experts else (),
        final_soft_cap=keys.get("final_logit_softcapping"),
        **gemma_fields(keys, keys.size("head_dim")),
    )


def _full_layers(keys: ConfigKeys, kv_heads: int) -> tuple[int, int]:
    """Return the size and the number of kv heads in full layers, which newer files state layer by layer."""
    tied = keys.get("attention_k_eq_v", False)
    stated = keys.get("per_layer_config")
    if stated is None:
        return keys.size("global_head_dim"), keys.size("num_global_key_value_heads", kv_heads) if tied else kv_heads
    alike = {tuple(sorted(layer.items())) for layer in stated.values()}
    layer = dict(alike.pop()) if len(alike) == 1 else {}
    read = ConfigKeys({"head_dim": keys.get("head_dim"), "num_key_value_heads": kv_heads, **layer})
    if alike or set(layer) - {"head_dim", "num_key_value_heads"}:
        keys.only("per_layer_config", "the size and the number of kv heads, alike in all full layers")
    return read.size("head_dim"), read.size("num_key_value_heads")


def unified_config(keys: ConfigKeys) -> ModelConfig:
    absent = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    return config(ConfigKeys({"sliding_window": 1024, **keys.raw, **absent}))


module = decoder_of("LayerEmbeddingBlock", "LayerEmbeddingDecoder")


def attention_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix, spec = f"model.layers.{layer}.self_attn", config.attention[layer]
    pages, H = config.pages_of(layer), config.num_heads
    K, D = pages.heads, pages.key_size
    spans, counts = heads(H, K, D), heads(H, K, 1)
    parts = "q" if not config.makes_keys(layer) else "qk" if spec.keys_as_values else "qkv"
    normed = min(2, len(parts))
    rows, role = tuple(span.size for span in spans[: len(parts)]), column(*spans[: len(parts)])
    sources = {
        "attention.qkv.weight": Source(names=tuple(f"{prefix}.{x}_proj.weight" for x in parts), rows=rows, role=role),
        "attention.out.weight": one(f"{prefix}.o_proj.weight", config.hidden_size, role=row(H * D)),
        "attention.qk_norm.weight": Source(
            names=tuple(f"{prefix}.{x}_norm.weight" for x in parts[:normed]),
            rows=(H, K)[:normed],
            tiled=True,
            role=column(*counts[:normed]),
        ),
    }
    if config.qkv_bias:
        names = tuple(f"{prefix}.{x}_proj.bias" for x in parts)
        sources["attention.qkv.bias"] = Source(names=names, rows=rows, role=role)
        sources["attention.out.bias"] = one(f"{prefix}.o_proj.bias", config.hidden_size)
    return sources


def norm_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    norms = norms_of(add=0.0, **(NORMS | EXPERT_NORMS if config.moe else NORMS))
    return norms(config, layer) | {"scalar": one(f"model.layers.{layer}.layer_scalar", 1)}


def embedding_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    if not config.layer_embedding:
        return {}
    prefix, E = f"model.layers.{layer}", config.hidden_size
    return {
        "embedding_gate.weight": one(f"{prefix}.per_layer_input_gate.weight", config.layer_embedding),
        "embedding_out.weight": one(f"{prefix}.per_layer_projection.weight", E),
        "embedding_norm.weight": one(f"{prefix}.post_per_layer_input_norm.weight", E),
    }


def experts_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    spec, prefix = config.moe[layer] if config.moe else None, f"model.layers.{layer}"
    if spec is None:
        return {}
    names = ("gate_proj", "up_proj", "down_proj")
    found = expert_sources(config, layer, f"{prefix}.router.proj", f"{prefix}.experts", names)
    return {path.replace("mlp.", "experts.", 1): source for path, source in found.items()} | {
        "experts.router_norm.weight": one(f"{prefix}.router.scale", config.hidden_size),
        "experts.expert_scalar": one(f"{prefix}.router.per_expert_scale", spec.num_experts),
    }


def manifest(config: ModelConfig) -> Manifest:
    size = config.layer_embedding
    sources = outer_sources(config)
    if size:
        V, rows = config.vocab_size, config.num_layers * size
        sources |= {
            "layer_embed.weight": one("model.embed_tokens_per_layer.weight", V, role=vocab(V)),
            "layer_projection.weight": one("model.per_layer_model_projection.weight", rows),
            "layer_projection_norm.weight": one("model.per_layer_projection_norm.weight", size),
        }
    pieces = (attention_sources, norm_sources, mlp_sources, embedding_sources, experts_sources)
    found = Manifest(sources | blocks(config, *pieces), fused=FusedExperts())
    return without_keys(found, config)


def without_keys(manifest: Manifest, config: ModelConfig) -> Manifest:
    """Return a manifest that ignores projections of layers attending to other layers' pages: checkpoints may
    have them.
    """
    shared = "|".join(str(layer) for layer in range(config.num_layers) if not config.makes_keys(layer))
    unused = (rf"layers\.({shared})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*",) if shared else ()
    return dataclasses.replace(manifest, ignored=(*manifest.ignored, *unused))


def read_gguf(model: GgufModel) -> dict[str, Any]:
    slides = model.numbers("attention.sliding_window_pattern").astype(bool).tolist()
    inner, kv_heads = model.each("feed_forward_length"), model.each("attention.head_count_kv")
    full = slides.index(False)
    factors = model.rope_factors(model.head_dim)
    tied = not model.has(f"blk.{full}.attn_v.weight")
    of_slides = dict(zip(slides, kv_heads, strict=True))
    if [of_slides[slide] for slide in slides] != kv_heads or not (tied or len(set(kv_heads)) == 1):
        raise model.unsupported("attention.head_count_kv", kv_heads, "(layers of different sizes)")
    keys = {
        "hidden_size": model.integer("embedding_length"),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.integer("attention.head_count"),
        "num_key_value_heads": of_slides.get(True, kv_heads[full]),
        "num_global_key_value_heads": kv_heads[full],
        "attention_k_eq_v": tied,
        "head_dim": model.integer("attention.key_length_swa"),
        "global_head_dim": model.head_dim,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "max_position_embeddings": model.integer("context_length"),
        "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not model.has("output.weight"),
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "sliding_window": model.integer("attention.sliding_window"),
        "num_kv_shared_layers": model.integer("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": model.integer("embedding_length_per_layer_input", 0),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": model.number("final_logit_softcapping", None),
        "rope_parameters": {
            "sliding_attention": {"rope_theta": model.number("rope.freq_base_swa", 10_000.0)},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": factors.count(1.0) / len(factors),
                "rope_theta": model.number("rope.freq_base", 1_000_000.0),
            },
        },
    }
    if not model.integer("expert_count", 0):
        return keys
    return keys | {"enable_moe_block": True, **model.experts(of_token="top_k_experts")}


NAMES = {
    **POST_NORMED, "post_feedforward_layernorm_1": "post_ffw_norm_1", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm", "router.proj": "ffn_gate_inp",
}  # fmt: skip
GGUF = GgufForm(
    architecture="gemma4",
    read=read_gguf,
    names=NAMES,
    tensors={
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
    },
    fused_experts=True,
    activation="gelu_tanh",
    reads_only="rekindle does not write layers of different sizes",
)
NESTED = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "global_head_dim": 512,
}  # fmt: skip
FAMILIES = {
    "gemma4_text": Family("Gemma4ForCausalLM", config, module, manifest, gguf=GGUF, nested=NESTED),
    "gemma4_unified_text": Family(
        "Gemma4UnifiedForCausalLM",
        unified_config,
        module,
        manifest,
        nested=NESTED | {"max_position_embeddings": 262_144},
    ),
}
