"""Heads of DFlash, which draft a block of tokens at once: layers of Qwen3 that read the inputs of a model's layers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import BlockSpec, ModelConfig
from rekindle._src.models.families import llama
from rekindle._src.models.family import Family, GgufForm, GgufModel
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Manifest, one
from rekindle.errors import UnsupportedModel

if TYPE_CHECKING:
    from rekindle._src.models.nn.block_head import BlockHead
    from rekindle._src.models.precision import Precision

MOST_BLOCK = 64  # tokens


def config(keys: ConfigKeys) -> ModelConfig:
    """Return the config of a head from its keys in the form of `loading.stored`."""
    for name in ("fc_layernorm", "markov_rank", "enable_confidence_head", "num_selector_layers"):
        keys.only(name, False, 0)  # DSpark and DFlash2 have more than blocks
    ids = keys.get("target_layer_ids")
    if not (isinstance(ids, list) and ids and all(type(one) is int and one >= 0 for one in ids)):
        raise UnsupportedModel(f"target_layer_ids={str(ids)[:80]} are not numbers of layers. Check config.json.")
    size = keys.size("block_size")
    if size < 2 or size > MOST_BLOCK:
        raise UnsupportedModel(f"block_size={size} in config.json is not from 2 to {MOST_BLOCK}. Use another head.")
    causal, layers = keys.get("causal"), keys.size("num_hidden_layers")
    slides = keys.layer_types([bool(keys.get("use_swa", False))] * layers)
    window = keys.size("swa_window_size", keys.get("sliding_window")) if any(slides) else None
    own = decoder(keys, kv_heads_implied=True, attention_bias=keys.get("attention_bias", False))

    def attention(layer: int, slide: bool) -> Any:
        forward = slide if causal is None else bool(causal)
        # transformers' windows that reach both ways have one token more on each side.
        reach = None if not slide or window is None else window + (not forward)
        return dataclasses.replace(own.attention[layer], causal=forward, sliding_window=reach)

    return dataclasses.replace(
        own,
        attention=tuple(attention(layer, slide) for layer, slide in enumerate(slides)),
        tie_embeddings=True,
        reads=tuple(one + 1 for one in ids),  # the outputs of layers are the inputs of those after them
        block=BlockSpec(size=size, mask=keys.whole("mask_token_id", -1)),
    )


def read_gguf(model: GgufModel) -> dict[str, Any]:
    for key in ("embedding_scale", "attention.scale", "attention.value_scale", "logit_scale"):
        model.only(key, 0.0, 1.0)
    for key in ("final_logit_softcapping", "hyper_connection_count"):
        model.only(key, 0)
    model.only("hidden_act", "silu")
    window = model.window
    return (
        model.decoder()
        | model.rope()
        | {
            "block_size": model.integer("block_size", 16),
            "causal": model.get("attention.causal"),
            "mask_token_id": model.mask_token,
            "target_layer_ids": [layer - 1 for layer in model.listed("target_layers")],  # the file has their inputs
        }
        | ({} if window is None else {"sliding_window": window} | model.sliding_layers())
    )


GGUF = GgufForm(
    architecture="dflash",
    read=read_gguf,
    tensors={"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight"},
    reads_only="rekindle writes no heads",
)


def module(config: ModelConfig, precision: Precision) -> BlockHead:
    from rekindle._src.models.nn.block_head import BlockHead
    from rekindle._src.models.nn.decoders import QkNormBlock

    return BlockHead(config, precision, QkNormBlock)


def manifest(config: ModelConfig) -> Manifest:
    E, pieces = config.hidden_size, (llama.attention_sources, llama.qk_norm_sources)
    sources = llama.blocks(config, *pieces, llama.norm_sources, llama.mlp_sources)
    sources |= {
        "join.weight": one("fc.weight", E),
        "context_norm.weight": one("hidden_norm.weight", E),
        "norm.weight": one("model.norm.weight", E),
    }
    # Some checkpoints have copies of the model's own.
    copies = r"(model\.)?embed_tokens\.weight", r"lm_head\.weight", r"token_embd\.weight"
    return Manifest(sources, ignored=copies)


FAMILIES = {"dflash": Family("DFlashDraftModel", config, module, manifest, gguf=GGUF)}
