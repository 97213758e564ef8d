"""LFM2 and LFM2.5: short convolutions in most layers, and attention with norms of q and k in the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig, RecurrentSpec
from rekindle._src.models.families.llama import attention_sources, manifest_of, mlp_of, norms_of
from rekindle._src.models.family import Family, GgufForm, Rewritten, decoder_of
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Source, one
from rekindle._src.models.roles import Span, column, heads, row

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    return decoder(keys, intermediate_size=_intermediate_size(keys), **mixer_fields(keys))


def mixer_fields(keys: Keys) -> dict[str, Any]:
    """Return the fields that do not depend on the MLPs."""
    keys.only("conv_bias", False)
    hidden, layers = keys.size("hidden_size"), keys.size("num_hidden_layers")
    state = RecurrentSpec(channels=hidden, taps=keys.size("conv_L_cache", 3))
    attends = keys.get("full_attn_idxs", range(layers))
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


def _intermediate_size(keys: Keys) -> int:
    size = keys.size("intermediate_size" if keys.get("block_ff_dim") is None else "block_ff_dim")
    if not keys.get("block_auto_adjust_ff_dim", True):
        return size
    multiple = keys.size("block_multiple_of", 256)
    size = int(keys.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


module = decoder_of("ConvolutionBlock")


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
    return attention_sources(config, layer) | {"attention.out.weight": out, "attention.qk_norm.weight": norm}


norm_sources = norms_of(attention_norm="operator_norm", mlp_norm="ffn_norm")


mlp_sources = mlp_of("feed_forward", "w1", "w3", "w2")


OUTER_NORM = "model.embedding_norm"
manifest = manifest_of(mixer_sources, norm_sources, mlp_sources, norm=OUTER_NORM)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return mixer_keys(model) | {"block_auto_adjust_ff_dim": False}


def mixer_keys(model: GgufModel) -> dict[str, Any]:
    keys = model.decoder("layer_norm_rms_epsilon", "leading_dense_block_count", gaps=True) | model.rope(
        theta=1_000_000.0
    )
    return keys | {
        "norm_eps": keys["rms_norm_eps"],
        "tie_embedding": keys["tie_word_embeddings"],
        "conv_L_cache": model.integer("shortconv.l_cache"),
        "layer_types": ["full_attention" if attends else "conv" for attends in model.attends()],
    }


def rewritten(config: ModelConfig, layer: int, name: str) -> Rewritten | None:
    spec = config.states[layer]
    return Rewritten((spec.channels, 1, spec.taps)) if spec is not None and name == "conv.conv.weight" else None


NAMES = {
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
REASON = "rekindle does not write states' matrices"
GGUF = GgufForm(architecture="lfm2", read=read_gguf, names=NAMES, rewritten=rewritten, reads_only=REASON)
FAMILY = Family("Lfm2ForCausalLM", config, module, manifest, gguf=GGUF)
