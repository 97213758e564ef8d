"""The families rekindle knows; a new one is a module beside this file and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rekindle.errors import UnsupportedModel
from rekindle.models import llama
from rekindle.models.config import ModelConfig
from rekindle.models.linear import Precision
from rekindle.models.weights import Manifest


class Family(NamedTuple):
    """How a model_type is computed and where its weights lie; its config reader is marked with `reads`."""

    architecture: str  # as in config.json's `architectures`
    module: Callable[[ModelConfig, Precision], Any]
    manifest: Callable[[ModelConfig], Manifest]


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", llama.Llama, llama.manifest),
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
    return family(config.model_type).manifest(config)
