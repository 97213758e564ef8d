"""The model families that rekindle implements. To add one, write its module in `families` and a line here.

A family's module is imported when a config of its type is read or its model is made. It imports flax, which a start
that finds its programs and weights in the cache does not need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.manifest import Manifest
from rekindle.errors import UnsupportedModel

if TYPE_CHECKING:
    from rekindle._src.models.family import Family

# model_type in config.json → the module that implements it.
FAMILIES: dict[str, str] = {
    "llama": "rekindle._src.models.families.llama",
    "mistral": "rekindle._src.models.families.mistral",
    "mixtral": "rekindle._src.models.families.mixtral",
    "qwen2": "rekindle._src.models.families.qwen2",
    "qwen3": "rekindle._src.models.families.qwen3",
    "qwen3_moe": "rekindle._src.models.families.qwen3_moe",
    "gemma2": "rekindle._src.models.families.gemma2",
    "gemma3_text": "rekindle._src.models.families.gemma3",
    "phi3": "rekindle._src.models.families.phi3",
    "smollm3": "rekindle._src.models.families.smollm3",
    "gpt2": "rekindle._src.models.families.gpt2",
    "olmo2": "rekindle._src.models.families.olmo2",
}


def family(model_type: str) -> Family:
    """Return the family of a model_type. Raise `UnsupportedModel`, which lists those that are implemented."""
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model_type={model_type!r} is not implemented. Use one of: {', '.join(sorted(FAMILIES))}."
        )
    entry: Family = import_module(FAMILIES[model_type]).FAMILY
    return entry


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the `ModelConfig` of a parsed config.json. Raise `UnsupportedModel` for anything not implemented."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        architectures = raw.get("architectures")
        architecture = architectures[0] if isinstance(architectures, list) and architectures else "?"
        raise UnsupportedModel(
            f"model_type={model_type!r} (architecture {architecture}) is not implemented. "
            f"Use one of: {', '.join(sorted(FAMILIES))}."
        )
    from rekindle._src.models.hf_config import Keys  # a start that finds everything kept needs neither
    from rekindle._src.models.loading.quantized.schemes import scheme

    scheme(raw)  # raises for a quantization_config that is not supported
    entry = family(model_type)
    try:
        return entry.config(Keys(raw, entry.aliases))
    except UnsupportedModel:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UnsupportedModel(
            f"config.json has a value of the wrong kind ({type(error).__name__}: {error}). Download it again."
        ) from error


def manifest(config: ModelConfig) -> Manifest:
    """Return the sources of the model's parameters in a checkpoint."""
    result = family(config.model_type).manifest(config)
    if config.tie_embeddings:  # some checkpoints store the head again; transformers ignores it too
        result = dataclasses.replace(result, ignored=(*result.ignored, r"lm_head\.weight"))
    return result
