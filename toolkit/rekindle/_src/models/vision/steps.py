"""Encoding in small steps, so that a large picture holds nobody up: the same result as `tower.encode`.

A layer's heads are computed for some rows of patches after the other, then its output. Each is one call of a program
that all layers share, with the first row as an argument: a bucket needs five programs however deep the encoder is, and
a step takes as long as its rows say.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.models.vision.inputs import PatchBatch
from rekindle._src.models.vision.layers import PatchHeads, PatchLayer, PatchPass, PictureEmbeddings
from rekindle._src.models.vision.tower import TowerGraph, abstract_module, merge_tower

LAYER = "layers."


class EncoderPrograms:
    """The programs of an encoder's steps. They compile once for each bucket and number of rows."""

    def __init__(self, graph: TowerGraph) -> None:
        self.graph = graph
        self.begin = jax.jit(functools.partial(_begin, graph))
        self.project = jax.jit(functools.partial(_project, graph), static_argnames="rows", donate_argnames="heads")
        self.mix = jax.jit(functools.partial(_mix, graph), static_argnames="rows", donate_argnames="out")
        self.level = jax.jit(functools.partial(_level, graph), static_argnames="number")
        self.end = jax.jit(functools.partial(_end, graph))


class LayerState(NamedTuple):
    """The arrays of a layer that is being computed."""

    x: Array  # [N, E]: its input
    out: Array  # [N, E]: its output, as far as it is computed
    heads: PatchHeads


def rows_for(graph: TowerGraph, bucket: int, operations: float) -> int:
    """Return how many rows a step can take for so many additions and multiplications; a power of two, at least 16."""
    config = graph.config
    width = config.num_heads * config.head_dim
    matrices = 2 * config.hidden_size * (4 * width + 3 * config.intermediate_size)
    most = max(16, int(operations / max(1, matrices + 4 * bucket * width)))
    return min(1 << (most.bit_length() - 1), 1 << (bucket - 1).bit_length())


def encode_in_steps(
    programs: EncoderPrograms, leaves: Sequence[Array], batch: PatchBatch, rows: int
) -> Iterator[PictureEmbeddings | None]:
    """Encode a bucket; yield None after each step, and the result as the last item.

    A step begins when the next item is asked for. Its program has been started by the device when it is yielded: wait
    for it with `jax.block_until_ready` where steps must not queue up.
    """
    config, count = programs.graph.config, batch.starts.shape[0]
    rows = min(rows, count)
    x, shared = programs.begin(leaves, batch)
    yield None
    levels = list[Array]()
    shape = (count, config.num_heads, config.head_dim)
    # The last rows are computed again with those before, so that every step has the same number.
    firsts = [*range(0, count - rows, rows), count - rows]
    for number in range(config.num_layers):
        layer = layer_leaves(programs.graph, leaves, number)
        state = LayerState(x, jnp.zeros_like(x), PatchHeads(*(jnp.zeros(shape, x.dtype) for _ in range(3))))
        for first in firsts:
            state = state._replace(heads=programs.project(layer, state.x, state.heads, shared, first, rows=rows))
            yield None
        for first in firsts:
            state = state._replace(
                out=programs.mix(layer, state.x, state.heads, shared, first, rows=rows, out=state.out)
            )
            yield None
        x = state.out
        if number in config.deepstack:
            levels.append(programs.level(leaves, x, batch, number=len(levels)))
            yield None
    tokens = programs.end(leaves, x, batch)
    yield PictureEmbeddings(tokens, jnp.stack(levels) if levels else jnp.zeros((0, *tokens.shape), tokens.dtype))


def layer_leaves(graph: TowerGraph, leaves: Sequence[Array], number: int) -> tuple[Array, ...]:
    """Return the leaves of one layer, in the order in which every layer has its own."""
    prefix = f"{LAYER}{number}."
    return tuple(leaf for path, leaf in zip(graph.paths, leaves, strict=True) if path.startswith(prefix))


def _begin(graph: TowerGraph, leaves: Sequence[Any], batch: PatchBatch) -> tuple[Array, PatchPass]:
    return merge_tower(graph, leaves).begin(batch)


def _project(
    graph: TowerGraph, leaves: Sequence[Any], x: Array, heads: PatchHeads, shared: PatchPass, first: Array, *, rows: int
) -> PatchHeads:
    part = _layer(graph, leaves).project(_cut(x, first, rows), _cut(shared, first, rows))
    put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
    return jax.tree.map(lambda whole, new: put(whole, new.astype(whole.dtype)), heads, part)


def _mix(
    graph: TowerGraph,
    leaves: Sequence[Any],
    x: Array,
    heads: PatchHeads,
    shared: PatchPass,
    first: Array,
    *,
    rows: int,
    out: Array,
) -> Array:
    part = _layer(graph, leaves).mix(
        _cut(x, first, rows), _cut(heads.q, first, rows), heads.k, heads.v, _cut(shared, first, rows)
    )
    return lax.dynamic_update_slice_in_dim(out, part.astype(out.dtype), first, axis=0)


def _level(graph: TowerGraph, leaves: Sequence[Any], x: Array, batch: PatchBatch, *, number: int) -> Array:
    return merge_tower(graph, leaves).level(number, x, batch)


def _end(graph: TowerGraph, leaves: Sequence[Any], x: Array, batch: PatchBatch) -> Array:
    return merge_tower(graph, leaves).end(x, batch)


def _cut(tree: Any, first: Array, rows: int) -> Any:
    """Return so many rows of each array, from one on."""
    return jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, first, rows), tree)


def _layer(graph: TowerGraph, leaves: Sequence[Any]) -> PatchLayer:
    """Return a layer with these leaves."""
    from flax import nnx

    definition, state = nnx.split(abstract_module(graph).layers[0])
    layer: PatchLayer = nnx.merge(definition, jax.tree.unflatten(jax.tree.structure(state), leaves))
    return layer
