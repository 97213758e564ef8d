"""Encoding in small steps, so that a large picture holds nobody up: the result is that of `tower.encode`.

Each step computes some rows: patches of the first layer's input, of a layer's heads, of its output, then tokens. All
layers and all levels share their programs, and the first row is an argument: a bucket needs few programs however deep
the encoder is, and a step takes as long as the number of its rows says.

`run_steps` runs them one after the other; a caller that has other things to do between them drives the generator
itself. Given shapes in the place of leaves and batch, and shapes as results, the same loop meets every program that a
bucket needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rekindle._src.models.vision.inputs import PatchBatch
from rekindle._src.models.vision.layers import PatchHeads, PatchPass, PictureEmbeddings, VisionTower
from rekindle._src.models.vision.tower import AbstractTower, TowerGraph, merge_tower

REPEATED = ("layers", "mergers")  # modules of which an encoder has several, all of the same shapes


class TowerStep(NamedTuple):
    """A program, and the arguments that it is called with."""

    name: str  # of the program within a bucket and a number of rows; steps with one name differ in arguments alone
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()  # arguments that are not used again: the result can take their memory


class TowerBuffers(NamedTuple):
    """The arrays of a bucket that steps write rows of."""

    x: Array  # [N, E]: a layer's input
    out: Array  # [N, E]: its output
    heads: PatchHeads
    shared: PatchPass


class TowerParts:
    """The leaves of an encoder by module: what each program needs of them, in an order that modules of a kind share."""

    def __init__(self, tower: AbstractTower) -> None:
        self.tower = tower
        self.places: dict[str, list[list[int]]] = {"": [[]], **{module: [] for module in REPEATED}}
        for place, path in enumerate(tower.graph.paths):
            module, _, rest = path.partition(".")
            number = int(rest.partition(".")[0]) if module in REPEATED else 0
            several = self.places[module if module in REPEATED else ""]
            several += [[] for _ in range(number + 1 - len(several))]
            several[number].append(place)

    def leaves(self, module: str, number: int, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the leaves of one of several modules; with "", those of the rest of the encoder."""
        return tuple(leaves[place] for place in self.places[module][number])

    def merged(self, module: str, leaves: Sequence[Any]) -> VisionTower:
        """Return an encoder whose first such module has these leaves, and all others have shapes."""
        merged: list[Any] = list(self.tower.shapes)
        for place, leaf in zip(self.places[module][0], leaves, strict=True):
            merged[place] = leaf
        return merge_tower(self.tower.graph, merged)


def rows_for(graph: TowerGraph, bucket: int, operations: float) -> int:
    """Return how many rows a step can have for so many additions and multiplications; a power of two, at least 16."""
    config = graph.config
    E, width, joined = config.hidden_size, config.num_heads * config.head_dim, config.hidden_size * config.merge**2
    of_row = max(
        2 * config.patch_length * E,
        6 * E * width,
        2 * E * (width + 3 * config.intermediate_size) + 4 * bucket * width,
        2 * joined * (joined + config.out_size) // config.patches_of_token,
    )
    rows = max(16, int(operations / of_row))
    return min(1 << (rows.bit_length() - 1), 1 << (bucket - 1).bit_length())


def tower_steps(
    tower: AbstractTower, leaves: Sequence[Any], batch: PatchBatch, rows: int
) -> Generator[TowerStep, Any, PictureEmbeddings]:
    """Yield the steps of encoding a bucket, of so many rows each; the result of each is sent in return."""
    config, parts, count, tokens = tower.graph.config, TowerParts(tower), batch.starts.shape[0], batch.tokens
    firsts, some = _firsts(count, rows), max(1, rows // config.patches_of_token)
    rows, some = min(rows, count), min(some, tokens)
    outer = parts.leaves("", 0, leaves)

    def program(name: str, function: Callable[..., Any], *arguments: Any, donated: tuple[int, ...] = ()) -> TowerStep:
        return TowerStep(name, functools.partial(function, parts), arguments, donated)

    def written(name: str, function: Callable[..., Any], own: Sequence[Any], x: Any) -> Generator[TowerStep, Any, Any]:
        result = yield program("blank", functools.partial(_blank, tokens=tokens))
        for first in _firsts(tokens, some):
            result = yield program(
                name, functools.partial(function, count=some), own, x, batch, result, first, donated=(3,)
            )
        return result

    buffers: TowerBuffers = yield program("buffers", _buffers, outer, batch)
    x, out, heads, shared = buffers
    for first in firsts:
        begin = functools.partial(_begin, count=rows)
        x, shared = yield program("begin", begin, outer, batch, x, shared, first, donated=(2, 3))
    levels = list[Any]()
    project, mix = functools.partial(_project, count=rows), functools.partial(_mix, count=rows)
    for number in range(config.num_layers):
        own = parts.leaves("layers", number, leaves)
        for first in firsts:
            heads = yield program("project", project, own, x, heads, shared, first, donated=(2,))
        for first in firsts:
            out = yield program("mix", mix, own, x, heads, shared, out, first, donated=(4,))
        x, out = out, x
        if number in config.deepstack:
            merger = parts.leaves("mergers", len(levels), leaves)
            levels.append((yield from written("level", _level, merger, x)))
    result = yield from written("end", _end, outer, x)
    joined = yield program("join", _join, result, levels)
    return PictureEmbeddings(result, joined)


def run_steps(
    steps: Generator[TowerStep, Any, PictureEmbeddings], run: Callable[[TowerStep], Any]
) -> PictureEmbeddings:
    """Run all steps; `run` returns the result of a step's function for its arguments, or the result's shapes."""
    try:
        step = next(steps)
        while True:
            step = steps.send(run(step))
    except StopIteration as end:
        result: PictureEmbeddings = end.value
        return result


def _firsts(count: int, rows: int) -> list[np.int32]:
    """Return the first row of each step. The last ones are computed with some before, so that all have as many."""
    return [np.int32(first) for first in (*range(0, max(0, count - rows), rows), max(0, count - rows))]


def _buffers(parts: TowerParts, outer: Sequence[Any], batch: PatchBatch) -> TowerBuffers:
    config = parts.tower.graph.config
    x, shared = jax.eval_shape(lambda outer, batch: parts.merged("", outer).begin(batch), outer, batch)
    heads = (jnp.zeros((config.num_heads, x.shape[0], config.head_dim), x.dtype) for _ in range(3))
    x, out, shared = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (x, x, shared))
    return TowerBuffers(x, out, PatchHeads(*heads), shared)


def _blank(parts: TowerParts, *, tokens: int) -> Array:
    graph = parts.tower.graph
    return jnp.zeros((tokens, graph.config.out_size), graph.precision.stream)


def _begin(
    parts: TowerParts, outer: Sequence[Any], batch: PatchBatch, x: Array, shared: PatchPass, first: Array, *, count: int
) -> tuple[Array, PatchPass]:
    cut = _cut(batch._replace(members=None), first, count)._replace(members=batch.members)
    return _put((x, shared), parts.merged("", outer).begin(cut), first)


def _project(
    parts: TowerParts, own: Sequence[Any], x: Array, heads: PatchHeads, shared: PatchPass, first: Array, *, count: int
) -> PatchHeads:
    layer = parts.merged("layers", own).layers[0]
    return _put(heads, layer.project(*_cut((x, shared), first, count)), first, axis=1)


def _mix(
    parts: TowerParts,
    own: Sequence[Any],
    x: Array,
    heads: PatchHeads,
    shared: PatchPass,
    out: Array,
    first: Array,
    *,
    count: int,
) -> Array:
    (rows, cut), q = _cut((x, shared), first, count), _cut(heads.q, first, count, axis=1)
    return _put(out, parts.merged("layers", own).layers[0].mix(rows, q, heads.k, heads.v, cut), first)


def _level(
    parts: TowerParts, own: Sequence[Any], x: Array, batch: PatchBatch, out: Array, first: Array, *, count: int
) -> Array:
    cut = batch._replace(members=_cut(batch.members, first, count))
    return _put(out, parts.merged("mergers", own).level(0, x, cut), first)


def _end(
    parts: TowerParts, own: Sequence[Any], x: Array, batch: PatchBatch, out: Array, first: Array, *, count: int
) -> Array:
    cut = batch._replace(members=_cut(batch.members, first, count))
    return _put(out, parts.merged("", own).end(x, cut), first)


def _join(parts: TowerParts, tokens: Array, levels: Sequence[Array]) -> Array:
    return jnp.stack(levels) if levels else jnp.zeros((0, *tokens.shape), tokens.dtype)


def _cut(tree: Any, first: Array, count: int, axis: int = 0) -> Any:
    """Return so many rows of each array, from one on."""
    return jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, first, count, axis), tree)


def _put(whole: Any, rows: Any, first: Array, axis: int = 0) -> Any:
    """Write rows to each array, from one on."""

    def put(array: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(array, new.astype(array.dtype), first, axis)

    return jax.tree.map(put, whole, rows)
