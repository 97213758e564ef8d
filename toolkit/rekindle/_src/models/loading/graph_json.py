"""A model's graph as JSON: its config, its precision and the paths of its leaves."""

from __future__ import annotations

import dataclasses
from typing import Any

from rekindle._src.models.base import Graph
from rekindle._src.models.config import AttentionSpec, ModelConfig, MoeSpec
from rekindle._src.models.nn.rope import RopeSpec
from rekindle._src.models.precision import Precision


def encode(graph: Graph) -> dict[str, Any]:
    """Return the graph as values that JSON keeps as they are; layers of one kind are described once."""
    config = {field.name: getattr(graph.config, field.name) for field in dataclasses.fields(ModelConfig)}
    attention = list(dict.fromkeys(graph.config.attention))
    experts = list(dict.fromkeys(graph.config.moe))
    return {
        "config": config | {"attention": None, "moe": None},
        "attention": [dataclasses.asdict(spec) for spec in attention],
        "layers": [attention.index(spec) for spec in graph.config.attention],
        "experts": [None if spec is None else dataclasses.asdict(spec) for spec in experts],
        "expert_layers": [experts.index(spec) for spec in graph.config.moe],
        "precision": dataclasses.asdict(graph.precision),
        "paths": graph.paths,
    }


def decode(found: dict[str, Any]) -> Graph:
    """Return the graph that was encoded. Raise TypeError, KeyError, ValueError or IndexError for anything else."""
    attention = [AttentionSpec(**spec | {"rope": _rope(spec["rope"])}) for spec in found["attention"]]
    experts = [None if spec is None else MoeSpec(**spec) for spec in found["experts"]]
    config = found["config"] | {
        "attention": tuple(attention[index] for index in found["layers"]),
        "moe": tuple(experts[index] for index in found["expert_layers"]),
        "eos_token_ids": tuple(found["config"]["eos_token_ids"]),
    }
    pairs = {
        name: tuple((str(path), str(kind)) for path, kind in found["precision"][name]) for name in ("kinds", "unpacked")
    }
    return Graph(ModelConfig(**config), Precision(**found["precision"] | pairs), tuple(found["paths"]))


def _rope(found: dict[str, Any] | None) -> RopeSpec | None:
    if found is None:
        return None
    factors = {name: tuple(found[name]) for name in ("short_factor", "long_factor")}
    return RopeSpec(**found | factors)
