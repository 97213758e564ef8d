"""A model and its own head apart: their graphs, and their leaves, which one checkpoint has."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from rekindle._src.models.base import Graph
from rekindle._src.models.config import Pages

T = TypeVar("T")
PREFIX = "drafter."  # of the head's paths in the model's graph
Kinds = tuple[tuple[str, str], ...]  # of matrices, by their paths


def trunk_of(graph: Graph, added: tuple[Pages, ...] = ()) -> Graph:
    """Return the graph of a model without its head; the session adds these pages."""
    if graph.config.draft_head is None and not added:
        return graph  # as in most sessions
    config = dataclasses.replace(graph.config, draft_head=None, added_pages=added)
    kinds, unpacked = (_without(each) for each in (graph.precision.kinds, graph.precision.unpacked))
    precision = dataclasses.replace(graph.precision, kinds=kinds, unpacked=unpacked)
    return Graph(config, precision, leaves_of_trunk(graph, graph.paths))


def head_of(graph: Graph) -> Graph:
    """Return the graph of a model's head."""
    assert graph.config.draft_head is not None, "the model has a head"
    kinds, unpacked = (_below(each) for each in (graph.precision.kinds, graph.precision.unpacked))
    precision = dataclasses.replace(graph.precision, kinds=kinds, unpacked=unpacked)
    paths = tuple(path.removeprefix(PREFIX) for path in leaves_of_head(graph, graph.paths))
    return Graph(graph.config.draft_head, precision, paths)


def leaves_of_trunk(graph: Graph, leaves: Sequence[T]) -> tuple[T, ...]:
    """Return the model's leaves from a whole graph's, without its head's."""
    if graph.config.draft_head is None:
        return tuple(leaves)
    return tuple(leaf for path, leaf in zip(graph.paths, leaves, strict=True) if not path.startswith(PREFIX))


def leaves_of_head(graph: Graph, leaves: Sequence[T]) -> tuple[T, ...]:
    """Return the leaves of a whole graph that are part of its head."""
    return tuple(leaf for path, leaf in zip(graph.paths, leaves, strict=True) if path.startswith(PREFIX))


def _without(kinds: Kinds) -> Kinds:
    return tuple(kind for kind in kinds if not kind[0].startswith(PREFIX))


def _below(kinds: Kinds) -> Kinds:
    return tuple((path.removeprefix(PREFIX), kind) for path, kind in kinds if path.startswith(PREFIX))
