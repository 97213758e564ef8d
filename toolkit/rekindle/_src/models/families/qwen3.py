"""Qwen3: Llama with a norm over each head of q and k. Qwen3-MoE has experts in some or all layers.

Heads of DFlash, which draft a block of tokens at once, have its layers.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import BlockSpec, ModelConfig
from rekindle._src.models.families import llama
from rekindle._src.models.families.qwen2 import sliding, sparse_layers
from rekindle._src.models.family import Family, GgufForm, GgufModel, decoder_of, with_biases
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Manifest, one
from rekindle.errors import UnsupportedModel

if TYPE_CHECKING:
    from rekindle._src.models.nn.block_head import BlockHead
    from rekindle._src.models.precision import Precision


def config(keys: ConfigKeys) -> ModelConfig:
    window, slides = sliding(keys)
    bias = keys.get("attention_bias", False)
    head_dim = keys.size("head_dim")
    rope = keys.rope(head_dim, sections=(24, 20, 20))  # in models that take pictures
    return decoder(keys, head_dim=head_dim, rope=rope, window=window, slides=slides.__getitem__, attention_bias=bias)


def moe_config(keys: ConfigKeys) -> ModelConfig:
    spec = keys.experts(normalize=keys.get("norm_topk_prob", False))
    window = keys.window(4096) if keys.get("use_sliding_window", False) else None
    moe = tuple(spec if sparse else None for sparse in sparse_layers(keys))
    return decoder(keys, window=window, attention_bias=keys.get("attention_bias", False), moe=moe)


module, moe_module = decoder_of("QkNormBlock"), decoder_of("QkNormSparseBlock")
manifest = llama.manifest_of(llama.attention_sources, llama.qk_norm_sources, llama.norm_sources, llama.mlp_sources)
moe_manifest = llama.manifest_of(
    llama.attention_sources, llama.qk_norm_sources, llama.norm_sources, llama.usual_expert_sources
)
read_gguf = with_biases(attention_bias="attn_q")


def read_moe_gguf(model: GgufModel) -> dict[str, Any]:
    return read_gguf(model) | model.experts() | {"norm_topk_prob": True}  # known by the architecture


def block_config(keys: ConfigKeys) -> ModelConfig:
    """Return the config of a DFlash head, whose keys are as `loading.stored` has them."""
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


def read_block_gguf(model: GgufModel) -> dict[str, Any]:
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


BLOCK_GGUF = GgufForm(
    architecture="dflash",
    read=read_block_gguf,
    tensors={"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight"},
    reads_only="rekindle writes no heads",
)


def block_module(config: ModelConfig, precision: Precision) -> BlockHead:
    from rekindle._src.models.nn.block_head import BlockHead
    from rekindle._src.models.nn.decoders import QkNormBlock

    return BlockHead(config, precision, QkNormBlock)


def block_manifest(config: ModelConfig) -> Manifest:
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


MOST_BLOCK = 64  # tokens
GGUF = GgufForm(architecture="qwen3", others=("qwen3vl",), read=read_gguf)
MOE_GGUF = GgufForm(architecture="qwen3moe", read=read_moe_gguf)
ALIASES = {"num_experts": "num_local_experts"}
FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", config, module, manifest, gguf=GGUF),
    "dflash": Family("DFlashDraftModel", block_config, block_module, block_manifest, gguf=BLOCK_GGUF),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", moe_config, moe_module, moe_manifest, ALIASES, MOE_GGUF),
}
