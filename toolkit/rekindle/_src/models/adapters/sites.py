"""The sites of adapters: the matrices of a model that may have one, by the names of modules."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from rekindle._src.models.base import graph_of
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.precision import Precision
from rekindle._src.models.registry import manifest
from rekindle._src.models.roles import REPLICATED, Role, Span, count_of

_USUAL_RANK = 256  # small models have adapters of such ranks, too


class Site(NamedTuple):
    """One matrix [out, in] of the layers, or a stack of them, one for each expert.

    Several modules of a checkpoint may lie in a matrix, one after the other. They have transformers' names, which
    trainers write, and those of the checkpoint.
    """

    path: str  # "layers.0.attention.qkv"
    modules: tuple[str, ...]  # "model.layers.0.self_attn.q_proj", …; in a stack, those of one expert after the other
    rows: tuple[int, ...]  # outputs of each module of a matrix
    inputs: int
    experts: int = 0  # matrices of a stack
    role: Role = REPLICATED  # which part of it a device has that shares the model with others
    interleaved: bool = False  # checkpoints that have all experts in one tensor alternate the rows of two modules
    stored: tuple[str, ...] = ()  # the checkpoint's names of the modules

    def rows_of(self, index: int) -> int:
        """Return the outputs of a module."""
        return self.rows[index % len(self.rows)]

    @property
    def outputs(self) -> int:
        """The number of rows of a matrix: the outputs of all its modules."""
        return sum(self.rows)

    @property
    def highest_rank(self) -> int:
        """The largest rank that an adapter of it may have: with more than its sides an adapter gains nothing."""
        return max(_USUAL_RANK, self.inputs, self.outputs)

    @property
    def spans(self) -> list[slice]:
        """The rows of each module in a matrix."""
        ends = [sum(self.rows[: index + 1]) for index in range(len(self.rows))]
        return [slice(end - count, end) for end, count in zip(ends, self.rows, strict=True)]

    @property
    def down_role(self) -> Role:
        """The role of its matrices of rank [modules, experts, rank, in], which are divided as its inputs are."""
        return self._role(-1)

    @property
    def up_role(self) -> Role:
        """The role of its matrices of rank [experts, rank, out], which are divided as its outputs are."""
        return self._role(self._output_axis)

    def _role(self, axis: int) -> Role:
        """Return its role with this axis as the last one; experts are the third from the end."""
        moved = ({0: -3} if self.experts else {}) | {axis: -1}
        divisions = self.role.divisions
        return Role(
            tuple(division._replace(axis=moved[division.axis]) for division in divisions if division.axis in moved)
        )

    @property
    def _output_axis(self) -> int:
        return 1 if self.experts else 0

    def local_rows(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the outputs of each module on one of the devices that share the model."""
        for axis, over, spans in self.role.divisions:
            if axis == self._output_axis:
                waiting, local = list(spans), []
                for rows in self.rows:
                    own: list[Span] = []
                    while sum(span.size for span in own) < rows:
                        own.append(waiting.pop(0))
                    assert sum(span.size for span in own) == rows, f"parts of {self.path} belong to several modules"
                    local.append(sum(span.local(count_of(over, sizes)) for span in own))
                return tuple(local)
        return self.rows


class Sites(NamedTuple):
    """The sites of a model, in the order of its layers, and the modules that can have no adapter."""

    sites: tuple[Site, ...]
    others: Mapping[str, str]  # name → why

    def by_module(self) -> dict[str, tuple[Site, int]]:
        """Return each module's site, and its place among the modules of that site."""
        return {name: (site, index) for site in self.sites for index, name in enumerate(site.modules)}

    def by_stored_name(self) -> dict[str, tuple[Site, int]]:
        """Return the same by the checkpoint's names of modules."""
        return {name: (site, index) for site in self.sites for index, name in enumerate(site.stored)}


@functools.lru_cache(maxsize=8)
def sites_of(config: ModelConfig) -> Sites:
    """Return the sites of a model with this config."""
    graph, shapes = graph_of(config, Precision.of("float32"))
    sizes = {path: leaf.shape for path, leaf in zip(graph.paths, shapes, strict=True)}
    sites: dict[str, Site] = {}
    others: dict[str, str] = {}
    origin = manifest(config)
    for path, source in origin.sources.items():
        module, _, end = path.rpartition(".")
        names = tuple(name.removesuffix(".weight") for name in source.names)
        if end != "weight" or not all(name.endswith(".weight") for name in source.names):
            continue
        experts, inner = (sizes[path][0] if source.stack else 0), module.startswith("layers.")
        if inner and len(sizes[path]) == 2 + source.stack and "norm" not in module.rpartition(".")[2]:
            interleaved = source.stack and origin.fused is not None and origin.fused.interleaved
            modules = tuple(origin.modules.get(name, name) for name in names)
            inputs = sizes[path][-1]
            sites[module] = Site(module, modules, source.rows, inputs, experts, source.role, interleaved, names)
        else:
            others |= dict.fromkeys(names, "is not a linear layer of a block")
    ordered = sorted(sites.values(), key=lambda site: (int(site.path.split(".")[1]), site.path))
    return Sites(tuple(ordered), others)
