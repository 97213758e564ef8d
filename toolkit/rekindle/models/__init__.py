"""Model families, their weights and their checkpoints. Names load their modules at first use, as rekindle's do."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rekindle.models.base import Graph, LoadedModel, Model, abstract_model, merge, random_model
    from rekindle.models.config import AttentionSpec, ModelConfig, MoeSpec
    from rekindle.models.layers import Attend
    from rekindle.models.precision import Precision
    from rekindle.models.registry import Family, family, manifest
    from rekindle.models.weights import Manifest, Part, Source

_NAMES = {
    "base": ("Graph", "LoadedModel", "Model", "abstract_model", "merge", "random_model"),
    "config": ("AttentionSpec", "ModelConfig", "MoeSpec"),
    "layers": ("Attend",),
    "precision": ("Precision",),
    "registry": ("Family", "family", "manifest"),
    "weights": ("Manifest", "Part", "Source"),
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
    "family",
    "manifest",
    "merge",
    "random_model",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f"rekindle.models.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'rekindle.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
