"""Assistants of Gemma 4: layers with queries alone; they attend to the pages of the model they draft for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import AssistantSpec, ModelConfig
from rekindle._src.models.families import gemma4_text, llama
from rekindle._src.models.families.gemma2 import gemma_fields
from rekindle._src.models.family import Family, GgufModel
from rekindle._src.models.hf_config import ConfigKeys, decoder
from rekindle._src.models.loading.manifest import Manifest, one
from rekindle._src.models.roles import vocab
from rekindle.errors import UnsupportedModel

if TYPE_CHECKING:
    from rekindle._src.models.precision import Precision


def config(keys: ConfigKeys) -> ModelConfig:
    """Return the config of an assistant: its layers have queries alone, and its logits have no cap."""
    for name, value in (("enable_moe_block", False), ("use_double_wide_mlp", False), ("attention_bias", False)):
        keys.only(name, value)
    keys.only("hidden_size_per_layer_input", 0)
    keys.only("tie_word_embeddings", True)
    clusters = nearest = 0
    if keys.get("use_ordered_embeddings", False):
        clusters = keys.size("num_centroids", 2048)
        nearest = keys.size("centroid_intermediate_top_k", 32)
        vocabulary = keys.size("vocab_size")
        if vocabulary % clusters or nearest > clusters:
            raise UnsupportedModel(
                f"num_centroids={clusters:,} and centroid_intermediate_top_k={nearest:,} in config.json don't fit: "
                f"clusters divide the {vocabulary:,} tokens evenly, and no more than all are chosen. Check the file."
            )
    kinds = gemma4_text.kinds_of_layers(keys)
    return decoder(
        keys,
        attention=kinds.attention,
        pages=kinds.pages,
        assists=AssistantSpec(hidden_size=keys.size("backbone_hidden_size"), centroids=clusters, nearest=nearest),
        **gemma_fields(keys, keys.size("head_dim")),
    )


def module(config: ModelConfig, precision: Precision) -> Any:
    from rekindle._src.models.nn.assistant import Assistant
    from rekindle._src.models.nn.decoders import LayerEmbeddingBlock

    return Assistant(config, precision, LayerEmbeddingBlock)


def manifest(config: ModelConfig) -> Manifest:
    spec, E, V = config.assists, config.hidden_size, config.vocab_size
    assert spec is not None, "the config is that of an assistant"
    sources = llama.blocks(config, gemma4_text.attention_sources, gemma4_text.norm_sources, llama.mlp_sources)
    sources["embed.weight"] = one("model.embed_tokens.weight", V, role=vocab(V))
    sources["norm.weight"] = one("model.norm.weight", E)
    sources["inputs.weight"] = one("pre_projection.weight", E)
    sources["outputs.weight"] = one("post_projection.weight", spec.hidden_size)
    if spec.centroids:
        sources["centroids.weight"] = one("masked_embedding.centroids.weight", spec.centroids)
        sources["clusters"] = one("masked_embedding.token_ordering", V, whole=True)
    found = gemma4_text.without_keys(Manifest(sources), config)
    # llama.cpp's names, of files whose metadata says nothing of clusters
    return dataclasses.replace(found, ignored=(*found.ignored, r"masked_embd_.*"))


def read_gguf(model: GgufModel) -> dict[str, Any]:
    """Return the config of an assistant. llama.cpp's files lack clusters, or have them unused: it drafts without."""
    if model.integer("attention.shared_kv_layers", model.layers) != model.layers:
        raise model.unsupported("attention.shared_kv_layers", model.integer("attention.shared_kv_layers"))
    return gemma4_text.read_gguf(model) | {
        "backbone_hidden_size": model.integer("embedding_length_out"),
        "use_ordered_embeddings": False,
    }


GGUF = dataclasses.replace(gemma4_text.GGUF, architecture="gemma4-assistant", read=read_gguf)
NESTED = gemma4_text.NESTED
FAMILIES = {
    "gemma4_assistant": Family("Gemma4AssistantForCausalLM", config, module, manifest, gguf=GGUF, nested=NESTED),
    "gemma4_unified_assistant": Family(
        "Gemma4UnifiedAssistantForCausalLM",
        config,
        module,
        manifest,
        nested=NESTED | {"sliding_window": 1024, "max_position_embeddings": 262_144},
    ),
}
