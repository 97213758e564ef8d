"""Model families, their weights and their checkpoints. Importing it registers every family."""

from rekindle.models.base import Graph, LoadedModel, Model, abstract_model, merge, random_model
from rekindle.models.config import AttentionSpec, ModelConfig, MoeSpec
from rekindle.models.layers import Attend
from rekindle.models.linear import Precision
from rekindle.models.registry import Family, family, manifest
from rekindle.models.weights import Manifest, Part, Source

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
