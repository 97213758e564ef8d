"""A step in parts: the opening before the layers, one layer, and the closing after them.

Layers that are alike share a part, so that XLA compiles as many as there are kinds of layers (mostly one) where the
step of `step.py` has all of them compiled. It runs slower: each part is a call, and nothing is fused across them.

The closing has two sizes. Steps whose rows are all greedy and have no other options need a small part of it, and it
compiles in a fraction of the time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import Array

from rekindle._src.models.base import Graph, Model, merge
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.feature import Paging, StepInputs
from rekindle._src.programs.flags import GREEDY
from rekindle._src.programs.packing import Layout, unpack
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.step import Computed, Leaves, Scores, StepOutput, finish, finish_forward

Tables = tuple[tuple[Array, ...], ...]  # of each of the model's ropes, as `rope.tables` returns them


class Opened(NamedTuple):
    """The results of the opening."""

    x: Array  # [R + T, E]
    tables: Tables
    own: tuple[Array, ...]  # what each layer reads alone, or nothing
    inputs: StepInputs


Opening = Callable[[Leaves, Array, Array, Array], Opened]
Layer = Callable[..., tuple[paged.Layer, Array]]  # of leaves, pages, x, tables, paging, and what it reads alone
Closing = Callable[[Leaves, RequestState, Array, StepInputs], tuple[RequestState, StepOutput]]
ForwardClosing = Callable[[Leaves, Array, StepInputs], tuple[Scores, tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The leaves of a model that each part reads, and the groups of layers that are alike."""

    graph: Graph
    leaves: Sequence[Any]  # all shapes
    outer: tuple[int, ...]  # the leaves of no layer
    layers: tuple[tuple[int, ...], ...]  # those of each layer
    kinds: tuple[int, ...]  # for each layer, the first one that is like it
    sources: tuple[int, ...]  # for each layer, the one whose pages it attends to

    @classmethod
    def of(cls, graph: Graph, leaves: Sequence[Any]) -> Cut:
        """Cut a graph into parts. Layers with the same leaves, the same attention, and the same experts are alike."""
        config, stored = graph.config, dict(graph.precision.kinds)
        owned: list[list[int]] = [[] for _ in range(config.num_layers)]
        outer: list[int] = []
        looks: list[list[Any]] = [[] for _ in owned]
        for index, (path, leaf) in enumerate(zip(graph.paths, leaves, strict=True)):
            first, _, rest = path.partition(".")
            if first != "layers":
                outer.append(index)
                continue
            number, _, name = rest.partition(".")
            owned[int(number)].append(index)
            looks[int(number)].append((name, leaf.shape, str(leaf.dtype), stored.get(path.rpartition(".")[0])))
        first_of_kind: dict[Any, int] = {}
        kinds = [
            first_of_kind.setdefault(
                (config.attention[layer], config.moe[layer] if config.moe else None, config.caches[layer], *look), layer
            )
            for layer, look in enumerate(looks)
        ]
        sources = map(config.source, range(config.num_layers))
        return cls(graph, leaves, tuple(outer), tuple(map(tuple, owned)), tuple(kinds), tuple(sources))

    def model(self, indices: Sequence[int], arrays: Leaves) -> Model:
        """Return the model with arrays where a part has them, and shapes elsewhere."""
        leaves = list(self.leaves)
        for index, leaf in zip(indices, arrays, strict=True):
            leaves[index] = leaf
        return merge(self.graph, leaves)


def make_opening(cut: Cut, layout: Layout, page_size: int) -> Opening:
    """Return the part from a step's buffers to the first layer. The leaves are the outer ones."""

    def opening(outer: Leaves, last_token: Array, ints: Array, floats: Array) -> Opened:
        inputs = unpack(layout, page_size, ints, floats, last_token)
        model = cut.model(cut.outer, outer)
        x, tables = model.begin(inputs.tokens, inputs.positions, inputs.rope_lengths)
        return Opened(x, tuple(tables.tables[rope] for rope in model.config.ropes), tables.own, inputs)

    return opening


def make_layer(cut: Cut, layer: int, layout: Layout, *, implementation: str | None = None) -> Layer:
    """Return the part of one layer, and of all that are like it. The caller donates its pages."""

    def run(
        leaves: Leaves, kv: paged.Layer, x: Array, tables: Tables, paging: Paging, *own: Array
    ) -> tuple[paged.Layer, Array]:
        from rekindle._src.models.nn.layers import RopeTables  # it imports flax, which only tracing needs

        model = cut.model(cut.layers[layer], leaves)
        pages = [kv] * (layer + 1)  # the layer reads the entry of its number
        fixed = cut.graph.precision.deterministic
        attend = paged.PagedAttention(model.config, pages, paging, layout.rows, implementation, deterministic=fixed)
        of_ropes = dict(zip(model.config.ropes, tables, strict=True))
        rope_tables = RopeTables.of(of_ropes, own * (layer + 1))  # the layer reads the entry of its number
        x = model.layers[layer](x, rope_tables, attend)
        return attend.kv[layer], x

    return run


def make_closing(cut: Cut, layout: Layout, *, greedy: bool = False) -> Closing:
    """Return the part from the last layer to a step's results; `greedy` is for steps without other options. The caller
    donates the state."""

    def closing(outer: Leaves, state: RequestState, x: Array, inputs: StepInputs) -> tuple[RequestState, StepOutput]:
        reduced = inputs._replace(any_flags=GREEDY) if greedy else inputs
        return finish(cut.graph, layout, _computed(cut, layout, outer, x), reduced, state)

    return closing


def make_forward_closing(cut: Cut, layout: Layout) -> ForwardClosing:
    """Return the part from the last layer to the results of a late step's first half."""

    def closing(outer: Leaves, x: Array, inputs: StepInputs) -> tuple[Scores, tuple[Any, ...]]:
        return finish_forward(layout, _computed(cut, layout, outer, x), inputs)

    return closing


def _computed(cut: Cut, layout: Layout, outer: Leaves, x: Array) -> Computed:
    """Return the results of the last layer; features that replace layers are not in programs made of parts."""
    model = cut.model(cut.outer, outer)
    return Computed(model, model.end(x), (None,) * len(layout.compiled))
