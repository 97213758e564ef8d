"""A step in parts: the opening before the layers, one layer, and the closing after them; and programs that call them.

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
from rekindle._src.programs.ledger import Compiled
from rekindle._src.programs.packing import Layout, unpack
from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.step import Computed, Leaves, Operands, Scores, StepOutput, finish, finish_forward

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


class LayeredProgram:
    """A program that runs its parts one after the other.

    To its callers it is like a compiled one: it has the same arguments and results, and donates the same arguments.
    """

    def __init__(
        self,
        cut: Cut,
        opening: Compiled,
        layers: Sequence[Compiled],
        greedy: Compiled | None,
        rest: Callable[[], Compiled],
    ) -> None:
        """Put parts together. `greedy` is the closing of greedy steps without other options; `rest` returns that of all
        other steps."""
        self._cut, self._opening, self._layers, self._greedy, self._rest = cut, opening, layers, greedy, rest

    def complete(self) -> None:
        """Make the closing that serves all steps, unless it is ready."""
        self._rest()

    def as_text(self) -> str:
        """Return the text of the opening and the layers, as XLA compiled them."""
        return "\n".join(part.as_text() for part in (self._opening, *dict.fromkeys(self._layers)))

    def _run(
        self, leaves: Sequence[Any], kv: paged.KV, last_token: Any, ints: Any, floats: Any
    ) -> tuple[tuple[Any, ...], paged.KV, Opened]:
        """Run the opening and the layers. Return the outer leaves, the pages, and the inputs of the closing."""
        cut = self._cut
        outer = tuple(leaves[index] for index in cut.outer)
        opened: Opened = self._opening(outer, last_token, ints, floats)
        x, tables, paging, new_kv = opened.x, opened.tables, opened.inputs.paging, list(kv)
        for number, (layer, indices, source) in enumerate(zip(self._layers, cut.layers, cut.sources, strict=True)):
            own, mine = opened.own[number : number + 1], tuple(leaves[index] for index in indices)
            new_kv[source], x = layer(mine, new_kv[source], x, tables, paging, *own)
        return outer, tuple(new_kv), opened._replace(x=x)


class LayeredStep(LayeredProgram):
    """A step made of parts."""

    def __call__(
        self, leaves: Sequence[Any], kv: paged.KV, state: RequestState, ints: Any, floats: Any, operands: Operands
    ) -> tuple[paged.KV, RequestState, StepOutput]:
        greedy = self._greedy if int(ints[0]) & ~int(GREEDY) == 0 else None
        closing = greedy or self._rest()  # before pages are donated, since it may have to compile
        outer, new_kv, opened = self._run(leaves, kv, state.last_token, ints, floats)
        new_state, output = closing(outer, state, opened.x, opened.inputs)
        return new_kv, new_state, output


class LayeredForward(LayeredProgram):
    """The first half of a late step, made of parts."""

    def __call__(
        self, leaves: Sequence[Any], kv: paged.KV, last_token: Any, ints: Any, floats: Any, operands: Operands
    ) -> tuple[paged.KV, Scores, Any]:
        closing = self._rest()
        outer, new_kv, opened = self._run(leaves, kv, last_token, ints, floats)
        return new_kv, *closing(outer, opened.x, opened.inputs)
