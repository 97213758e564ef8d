"""The families rekindle knows; a new one is a module beside this file and a line here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families import (
    gemma2,
    gemma3,
    gpt2,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from rekindle._src.models.loading.manifest import Manifest
from rekindle._src.models.precision import Precision
from rekindle.errors import UnsupportedModel


class Family(NamedTuple):
    """How a model_type is computed and where its weights lie; its config reader is marked with `reads`."""

    architecture: str  # as in config.json's `architectures`
    module: Callable[[ModelConfig, Precision], Any]
    manifest: Callable[[ModelConfig], Manifest]


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", llama.Llama, llama.manifest),
    "mistral": Family("MistralForCausalLM", mistral.Mistral, mistral.manifest),
    "mixtral": Family("MixtralForCausalLM", mixtral.Mixtral, mixtral.manifest),
    "qwen2": Family("Qwen2ForCausalLM", qwen2.Qwen2, qwen2.manifest),
    "qwen3": Family("Qwen3ForCausalLM", qwen3.Qwen3, qwen3.manifest),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qwen3_moe.Qwen3Moe, qwen3_moe.manifest),
    "gemma2": Family("Gemma2ForCausalLM", gemma2.Gemma2, gemma2.manifest),
    "gemma3_text": Family("Gemma3ForCausalLM", gemma3.Gemma3, gemma3.manifest),
    "phi3": Family("Phi3ForCausalLM", phi3.Phi3, phi3.manifest),
    "smollm3": Family("SmolLM3ForCausalLM", smollm3.SmolLM3, smollm3.manifest),
    "gpt2": Family("GPT2LMHeadModel", gpt2.Gpt2, gpt2.manifest),
    "olmo2": Family("Olmo2ForCausalLM", olmo2.Olmo2, olmo2.manifest),
}


def family(model_type: str) -> Family:
    """The family of a `ModelConfig.model_type`."""
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model_type={model_type!r} is not implemented. Use one of: {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[model_type]


def manifest(config: ModelConfig) -> Manifest:
    """Where the model's parameters come from in a checkpoint."""
    found = family(config.model_type).manifest(config)
    if config.tie_embeddings:  # some checkpoints store the head again; transformers ignores it too
        found = dataclasses.replace(found, ignored=(*found.ignored, r"lm_head\.weight"))
    return found
