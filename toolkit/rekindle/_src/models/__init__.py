"""Model families, their weights and their checkpoints. A name loads its module when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rekindle._src.models.base import Graph, LoadedModel, Model, abstract_model, merge, random_model
    from rekindle._src.models.config import AttentionSpec, ModelConfig, MoeSpec
    from rekindle._src.models.family import Family
    from rekindle._src.models.loading.manifest import Manifest, Part, Source
    from rekindle._src.models.nn.layers import Attend
    from rekindle._src.models.precision import Precision
    from rekindle._src.models.registry import config_from_hf, family, manifest

_NAMES = {
    "base": ("Graph", "LoadedModel", "Model", "abstract_model", "merge", "random_model"),
    "config": ("AttentionSpec", "ModelConfig", "MoeSpec"),
    "nn.layers": ("Attend",),
    "precision": ("Precision",),
    "family": ("Family",),
    "registry": ("config_from_hf", "family", "manifest"),
    "loading.manifest": ("Manifest", "Part", "Source"),
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Attend",
    "AttentionSpec",
    "Family",
    "Graph",
    "LoadedModel",
    "Manifest",
    "Model",
    "ModelConfig",
    "MoeSpec",
    "Part",
    "Precision",
    "Source",
    "abstract_model",
    "config_from_hf",
    "family",
    "manifest",
    "merge",
    "random_model",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f"rekindle._src.models.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'rekindle._src.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
