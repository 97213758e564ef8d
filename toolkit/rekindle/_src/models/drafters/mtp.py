"""Heads that models have of their own: in the checkpoint, a block more that drafts the token after the next one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rekindle._src.models.config import ModelConfig, Pages
from rekindle._src.models.families import bailing_hybrid, deepseek_v2, llama, qwen2, qwen3_5_text
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import ConfigKeys
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle.errors import UnsupportedModel

if TYPE_CHECKING:
    from rekindle._src.models.precision import Precision


class DraftForm(NamedTuple):
    """The head of a family that drafts tokens: the config of its layer, and the sources of its weights."""

    config: Callable[[ModelConfig], ModelConfig]  # of the model's config
    sources: Callable[[ModelConfig], Mapping[str, Source]]  # of the model's config, by paths below `drafter.`


def config_of_qwen(config: ModelConfig) -> ModelConfig:
    """Return the config of the layer that drafts tokens: attention, with experts where the others have some."""
    attends = next((layer for layer, state in enumerate(config.states) if state is None), 0)
    return dataclasses.replace(
        config,
        model_type="qwen3_5_mtp",
        num_layers=1,
        attention=config.attention[attends : attends + 1],
        moe=config.moe[:1],
        recurrent=(),
        pictures=None,
        tie_embeddings=True,
    )


def sources_of_qwen(config: ModelConfig) -> dict[str, Source]:
    """Return the sources of the head that drafts tokens."""
    head, E = config.draft_head, config.hidden_size
    assert head is not None, "the model has a head"
    mlps = qwen2.moe_sources if config.moe else llama.mlp_sources
    layer = {
        path.removeprefix("layers.0."): source.renamed("model.", "mtp.")
        for path, source in llama.blocks(head, qwen3_5_text.mixer_sources, qwen3_5_text.norm_sources, mlps).items()
    }
    return {
        "embedding_norm.weight": one("mtp.pre_fc_norm_embedding.weight", E, add=1.0),
        "hidden_norm.weight": one("mtp.pre_fc_norm_hidden.weight", E, add=1.0),
        "join.weight": one("mtp.fc.weight", E),
        "norm.weight": one("mtp.norm.weight", E, add=1.0),
        **{f"layer.{path}": source for path, source in layer.items()},
    }


def config_of_glm(config: ModelConfig) -> ModelConfig:
    """Return the config of the layer that drafts tokens, which has the form of the model's last layer."""
    return of_last_layer(config, "glm4_moe_lite_mtp")


def of_last_layer(config: ModelConfig, model_type: str) -> ModelConfig:
    """Return the config of a head that is one layer like the last one. It attends, even where that one has a state."""
    assert config.latent is not None, "the families with such a head have latent pages"
    last = config.num_layers - 1
    return dataclasses.replace(
        config,
        model_type=model_type,
        num_layers=1,
        attention=config.attention[last:],
        pages=(Pages(1, config.head_dim, config.latent.rank),),
        moe=config.moe[last:],
        recurrent=(),
        tie_embeddings=True,
    )


def sources_of_glm(config: ModelConfig) -> dict[str, Source]:
    """Return the sources of the head that drafts tokens, a block after the last layer."""
    head, E, block = config.draft_head, config.hidden_size, f"model.layers.{config.num_layers}"
    assert head is not None, "the model has a head"
    layer = llama.blocks(head, deepseek_v2.attention_sources, llama.norm_sources, deepseek_v2.mlp_sources)
    return head_block(E, block, layer, norm="shared_head.norm")


def head_block(E: int, block: str, layer: Mapping[str, Source], *, norm: str) -> dict[str, Source]:
    """Return the sources of a head that is a block of the checkpoint, with the sources of a first layer renamed."""
    return {
        "embedding_norm.weight": one(f"{block}.enorm.weight", E),
        "hidden_norm.weight": one(f"{block}.hnorm.weight", E),
        "join.weight": one(f"{block}.eh_proj.weight", E),
        "norm.weight": one(f"{block}.{norm}.weight", E),
        **{
            f"layer.{path.removeprefix('layers.0.')}": source.renamed("model.layers.0", block)
            for path, source in layer.items()
        },
    }


def config_of_ling(config: ModelConfig) -> ModelConfig:
    """Return the config of the layer that drafts tokens: attention and experts, as in the model's last layer."""
    return of_last_layer(config, "bailing_hybrid_mtp")


def sources_of_ling(config: ModelConfig) -> dict[str, Source]:
    """Return the sources of the head that drafts tokens, a block after the last layer."""
    head, E, block = config.draft_head, config.hidden_size, f"model.layers.{config.num_layers}"
    assert head is not None, "the model has a head"
    mixer, mlp = bailing_hybrid.attention_sources, bailing_hybrid.mlp_sources
    return head_block(E, block, llama.blocks(head, mixer, llama.norm_sources, mlp), norm="final_layernorm")


def part_of_a_checkpoint(keys: ConfigKeys) -> ModelConfig:
    """Refuse a config of a head alone."""
    raise UnsupportedModel(f'{keys.get("model_type")} is part of a model. Open that model, with drafts="mtp".')


def manifest(config: ModelConfig) -> Manifest:
    """Return no sources: the model's form has them."""
    return Manifest({})


def module_of(block: str) -> Callable[[ModelConfig, Precision], Any]:
    """Return the `module` of a head with this block, by its name in `nn/decoders.py`."""

    def module(config: ModelConfig, precision: Precision) -> Any:
        from rekindle._src.models.nn import decoders, draft_heads

        return draft_heads.DraftHead(config, precision, getattr(decoders, block))

    return module


QWEN, GLM = DraftForm(config_of_qwen, sources_of_qwen), DraftForm(config_of_glm, sources_of_glm)
LING = DraftForm(config_of_ling, sources_of_ling)
HEADS = {"qwen3_5_text": QWEN, "qwen3_5_moe_text": QWEN, "glm4_moe_lite": GLM, "bailing_hybrid": LING}
FAMILIES = {
    "bailing_hybrid_mtp": Family("", part_of_a_checkpoint, module_of("LatentBlock"), manifest),
    "glm4_moe_lite_mtp": Family("", part_of_a_checkpoint, module_of("LatentBlock"), manifest),
    "qwen3_5_mtp": Family("", part_of_a_checkpoint, module_of("DeltaBlock"), manifest),
}
