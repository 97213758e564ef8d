"""Heads of EAGLE-3: a layer of Llama that reads the inputs of a model's layers next to the tokens."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import EagleSpec, ModelConfig
from rekindle._src.models.families import llama
from rekindle._src.models.family import Family, GgufForm, GgufModel
from rekindle._src.models.hf_config import ConfigKeys
from rekindle._src.models.loading.manifest import Manifest, one
from rekindle.errors import UnsupportedModel

if TYPE_CHECKING:
    from rekindle._src.models.nn.draft_heads import EagleHead
    from rekindle._src.models.precision import Precision


def config(keys: ConfigKeys) -> ModelConfig:
    """Return the config of a head from its keys in the form of `loading.stored`."""
    own = dataclasses.replace(llama.config(keys), tie_embeddings=True)
    layers = keys.get("eagle_aux_hidden_state_layer_ids")
    if own.num_layers != 1:
        raise UnsupportedModel(f"num_hidden_layers={own.num_layers} of an EAGLE-3 head is not 1. Use another head.")
    if layers is not None and not (
        isinstance(layers, list) and layers and all(type(one) is int and one >= 0 for one in layers)
    ):
        raise UnsupportedModel(
            f"eagle_aux_hidden_state_layer_ids={str(layers)[:80]} are not numbers of layers. Check config.json."
        )
    present = keys.get("tensors")
    spec = EagleSpec(
        hidden_size=keys.size("target_hidden_size", own.hidden_size),
        inputs=3 if layers is None else len(layers),
        vocab_size=keys.size("draft_vocab_size", own.vocab_size),
        own_embedding="embed_tokens" in present,
        own_head="lm_head" in present,
        maps="d2t" in present,
        absolute=bool(keys.get("absolute_ids", False)),
        norm_before_residual=bool(keys.get("norm_before_residual", False)),
        norm_before_join=bool(keys.get("norm_before_fc", False)),
    )
    if spec.vocab_size != own.vocab_size and not (spec.maps and spec.own_head):
        raise UnsupportedModel(
            f"draft_vocab_size={spec.vocab_size} is not vocab_size={own.vocab_size}, and the head lacks the tensor "
            f"{'lm_head' if spec.maps else 'd2t'}. Use a whole checkpoint."
        )
    return dataclasses.replace(own, reads=tuple(layers or ()), eagle=spec)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    optional = {"embed_tokens": "token_embd.weight", "lm_head": "output.weight", "d2t": "d2t"}
    present = [key for key, name in optional.items() if model.has(name)]
    draft = model.tensors["output.weight"].shape[0] if "lm_head" in present else model.integer("vocab_size")
    return (
        model.decoder()
        | model.rope()
        | {
            "target_hidden_size": model.integer("target_hidden_size"),
            "draft_vocab_size": draft,
            "eagle_aux_hidden_state_layer_ids": model.listed("target_layers"),
            "norm_before_residual": model.get("norm_before_residual", False),
            "norm_before_fc": model.get("norm_before_fc", False),
            "tensors": present,
            "absolute_ids": True,
        }
    )


GGUF = GgufForm(
    architecture="eagle3",
    read=read_gguf,
    paired=True,
    names={"hidden_norm": "attn_norm_2"},
    tensors={"d2t": "d2t", "fc.weight": "fc.weight", "input_norm.weight": "enc.output_norm.weight"},
    reads_only="rekindle writes no heads",
)


def module(config: ModelConfig, precision: Precision) -> EagleHead:
    from rekindle._src.models.nn.draft_heads import EagleHead

    return EagleHead(config, precision)


def manifest(config: ModelConfig) -> Manifest:
    spec, E = config.eagle, config.hidden_size
    assert spec is not None, "the config is that of an EAGLE-3 head"
    norms = llama.norms_of(
        embedding_norm="input_layernorm", hidden_norm="hidden_norm", mlp_norm="post_attention_layernorm"
    )
    sources = llama.attention_sources(config, 0) | norms(config, 0) | llama.mlp_sources(config, 0)
    sources |= {"join.weight": one("fc.weight", E), "norm.weight": one("model.norm.weight", E)}
    if spec.norm_before_join:
        sources["inputs_norm.weight"] = one("input_norm.weight", spec.inputs * spec.hidden_size)
    if spec.own_embedding:
        sources["embed.weight"] = one("model.embed_tokens.weight", config.vocab_size)
    if spec.own_head:
        sources["head.weight"] = one("lm_head.weight", spec.vocab_size)
    if spec.maps:
        sources["tokens"] = one("d2t", spec.vocab_size, whole=True)
    found = Manifest(sources)
    return dataclasses.replace(found, ignored=(*found.ignored, "t2d"))  # True for the tokens that it can draft


FAMILIES = {"eagle3": Family("LlamaForCausalLMEagle3", config, module, manifest, gguf=GGUF)}
