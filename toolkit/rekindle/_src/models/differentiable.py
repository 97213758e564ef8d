"""A model's pass over one prompt for derivatives in reverse, with the weights as a session holds them.

It is computed in float32 whatever the weights are stored in. Each product widens its matrix to float32, some outputs
after others if it is large, and again in the backward pass: in between, nothing is kept but the stored matrix. Rows
are not rounded, also where steps round them to 8 bits. So derivatives are those of the widened weights.
Each layer is computed again in the backward pass: of all layers, the inputs alone are kept.

Axes: T tokens, E hidden size, N rows, I inputs, O outputs, G experts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rekindle._src.models.base import Graph, Model, merge
from rekindle._src.models.config import AttentionSpec
from rekindle._src.models.hooks import NO_DELTAS, Deltas, Listener, heard
from rekindle._src.models.kept import Keep, keep_nothing
from rekindle._src.models.nn.forward import ForwardPass
from rekindle._src.models.nn.linear import Linear, Matrix, Products
from rekindle._src.models.nn.packing import is_packed
from rekindle._src.models.plain import PlainAttention
from rekindle_kernels import LinearOptions, gated, int4, rms_norm

AT_ONCE = 32 << 20  # bytes of float32 that a matrix is widened to at once
Point = tuple[str, int]  # a site and its layer
EMBEDDING, NORM = ("embedding", 0), ("norm", 0)


class StoredMatrix(NamedTuple):
    """The leaves of a matrix, or of a stack of them."""

    weight: Array
    scale: Array | None
    minimum: Array | None


def widened(stored: StoredMatrix, floats: str) -> Array:
    """Return a stored matrix in float32. A uint16 matrix holds the bits of values of the dtype `floats`."""
    weight, scale, minimum = stored
    if is_packed(weight):
        assert scale is not None, "integers have scales"
        return int4.dequantized(weight, scale, minimum, jnp.float32)
    if weight.dtype == jnp.uint16:
        weight = jax.lax.bitcast_convert_type(weight, jnp.dtype(floats))
    values = weight.astype(jnp.float32)
    return values if scale is None else values * scale[..., None].astype(jnp.float32)


def tiles_of(stored: StoredMatrix) -> int:
    """Return the number of equal parts, along the first axis, that a matrix is widened in; 1 if there are none."""
    weight = stored.weight
    if weight.dtype == jnp.float32 and stored.scale is None:
        return 1  # it is wide
    shape = int4.matrix_shape(weight) if is_packed(weight) else weight.shape
    least = max(1, -(-4 * math.prod(shape) // AT_ONCE))
    blocks = weight.shape[0]
    return next((count for count in range(least, min(8 * least, blocks) + 1) if blocks % count == 0), 1)


def _tiled(stored: StoredMatrix, count: int) -> StoredMatrix:
    return jax.tree.map(lambda leaf: leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:]), stored)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(floats: str, x: Array, stored: StoredMatrix) -> Array:
    """Compute x [N, I] · matrix [O, I] → [N, O]. The matrix has no derivative."""
    count = tiles_of(stored)
    if count == 1:
        return _dot(x, widened(stored, floats))
    parts: Array = jax.lax.map(lambda tile: _dot(x, widened(tile, floats)), _tiled(stored, count))
    return jnp.swapaxes(parts, 0, 1).reshape(x.shape[0], -1)


def _forward(floats: str, x: Array, stored: StoredMatrix) -> tuple[Array, StoredMatrix]:
    return product(floats, x, stored), stored


def _backward(floats: str, stored: StoredMatrix, change: Array) -> tuple[Array, None]:
    count = tiles_of(stored)
    if count == 1:
        return _dot(change, widened(stored, floats).T), None

    def add(total: Array, tile: tuple[Array, StoredMatrix]) -> tuple[Array, None]:
        return total + _dot(tile[0], widened(tile[1], floats).T), None

    changes = jnp.swapaxes(change.reshape(change.shape[0], count, -1), 0, 1)
    inputs = jax.eval_shape(functools.partial(widened, floats=floats), stored).shape[-1]
    total, _ = jax.lax.scan(add, jnp.zeros((change.shape[0], inputs), jnp.float32), (changes, _tiled(stored, count)))
    return total, None


product.defvjp(_forward, _backward)


def _dot(x: Array, matrix: Array) -> Array:
    return jnp.einsum("ni,oi->no", x, matrix, precision="highest")


class WideProducts(Products):
    """Products in float32 with stored matrices. They have derivatives by their rows."""

    def __init__(self, floats: str, keep: Keep = keep_nothing) -> None:
        self._floats, self._keep = floats, keep

    def linear(self, x: Array, matrix: Matrix, count: Array | None, options: LinearOptions, **more: Any) -> Array:
        residual, norm = more.get("residual"), more.get("norm")
        out = jnp.dtype(more.get("dtype") or x.dtype)
        rows = x if norm is None else rms_norm(x, norm, options.eps, implementation="xla")
        flat = rows.reshape(-1, rows.shape[-1]).astype(jnp.float32)
        y = product(self._floats, flat, StoredMatrix(*matrix.arrays)).reshape(*x.shape[:-1], -1)
        if not isinstance(matrix, Linear) or matrix.delta is None:  # else the delta keeps the sum
            y = self._keep(y)
        y = y if options.gate is None else gated(y, options.gate, implementation="xla")
        y = y.astype(out)
        return y if residual is None else residual + y

    def grouped(self, x: Array, stack: Matrix, sizes: Array) -> Array:
        """Compute the products of one expert after the other, over all rows: an expert adds to its own alone."""
        ends = jnp.cumsum(sizes)
        stored, rows = StoredMatrix(*stack.arrays), x.astype(jnp.float32)

        def add(total: Array, expert: tuple[StoredMatrix, Array, Array]) -> tuple[Array, None]:
            matrix, start, stop = expert
            index = jnp.arange(rows.shape[0])
            own = ((index >= start) & (index < stop))[:, None]
            return total + product(self._floats, jnp.where(own, rows, 0.0), matrix), None

        outputs = stack.shape[-2]
        zeros = jnp.zeros((rows.shape[0], outputs), jnp.float32)
        total, _ = jax.lax.scan(add, zeros, (stored, ends - sizes, ends))
        return self._keep(total).astype(x.dtype)


def differentiable(graph: Graph) -> Graph:
    """Return the graph of a model for derivatives: in float32, without native kernels and loops of unknown length."""
    precision = dataclasses.replace(
        graph.precision, stream="float32", loop_experts=False, implementation="xla", deterministic=False
    )
    return dataclasses.replace(graph, precision=precision)


class PassResult(NamedTuple):
    """The results of a pass."""

    hidden: Array  # [T, E] after the final norm
    arrays: Mapping[Point, Array]  # at the points, as they are with what was added to them


def at_points(point: Point) -> Point:
    """Return the point at which an array is named: before a layer is after the one before."""
    site, layer = point
    return ("residual", layer - 1) if site == "residual_before" and layer else point


class Coordinates(NamedTuple):
    """The places of a prompt's tokens [T] with pictures among them."""

    positions: Array  # [T], or [T, 3] where ropes have coordinates
    sees: Array  # int32 [T]: the end of each token's picture, where its tokens see each other; else 0


class HeadsAttention(PlainAttention):
    """Attention that names the output of its heads, as the site "heads" of `listeners`."""

    listeners: Sequence[Listener] = ()  # of the layer that is computed
    sees: Array | None = None  # as in `Coordinates`
    _seen: Array | None = None

    def visible(self, spec: AttentionSpec) -> Array:
        before = super().visible(spec)
        if self._seen is None:
            return before
        place = jnp.arange(before.shape[0])
        inside = (place < self._seen[:, None]) & (place > place[:, None])
        window = spec.sliding_window
        return before | (inside if window is None else inside & (place > place[:, None] - window))

    def __call__(self, layer: int, q: Array, k: Array | None, v: Array | None, sinks: Array | None = None, /) -> Array:
        self._seen = self.sees if self._config.sees_pictures_both_ways(layer) else None
        return heard(self.listeners, "heads", layer, super().__call__(layer, q, k, v, sinks))


def recomputing_pass(
    module: Model,
    tokens: Array,
    length: Array,
    points: Sequence[Point],
    added: Mapping[Point, Array],
    listener: Listener = lambda site, layer: None,
    rows: int = 1,
    places: Coordinates | None = None,
) -> PassResult:
    """Compute a prompt [T] with these arrays added at points, after what the listener changes.

    The first `length` tokens are the prompt; padding follows. With several `rows`, tokens are those of prompts of one
    size, one after the other, and `length` may have a number for each. `places` are those of one prompt with pictures.
    """
    size = tokens.shape[0] // rows
    attend = HeadsAttention(module, size, rows)
    attend.sees = None if places is None else places.sees
    arrays: dict[Point, Array] = {}

    def adding(own: Mapping[Point, Array], named: dict[Point, Array]) -> Listener:
        def at(site: str, layer: int) -> Callable[[Array], Array] | None:
            point = site, layer
            if point not in points:
                return None

            def add(array: Array) -> Array:
                named[point] = array + own[point].astype(array.dtype) if point in own else array
                return named[point]

            return add

        return at

    outer = listener, adding(added, arrays)
    positions = jnp.tile(jnp.arange(size, dtype=jnp.int32), rows) if places is None else places.positions
    lengths = jnp.repeat(jnp.broadcast_to(jnp.asarray(length, jnp.int32), rows), size)
    x, tables = module.begin(tokens, positions, lengths, outer)
    x = heard(outer, "residual_before", 0, x)

    def run(number: int, x: Array, own: Mapping[Point, Array], kept: Any) -> Any:
        found: dict[Point, Array] = {}
        attend.kept, attend.listeners = dict(kept), (listener, adding(own, found))
        here = ForwardPass(tables, attend, attend.listeners).of(number)
        x = here.at("residual", module.layers[number](x, here))
        return x, attend.kept, found

    for number in range(len(module.layers)):
        own = {point: array for point, array in added.items() if point[1] == number and point[0] not in _OUTSIDE}
        x, attend.kept, found = jax.checkpoint(functools.partial(run, number))(x, own, attend.kept)
        arrays.update(found)
    hidden = module.end(x)
    if NORM in points:
        hidden = hidden + added[NORM] if NORM in added else hidden
        arrays[NORM] = hidden
    return PassResult(hidden, arrays)


_OUTSIDE = ("embedding", "residual_before", "norm")


def module_of(graph: Graph, leaves: Sequence[Array], deltas: Deltas = NO_DELTAS, keep: Keep = keep_nothing) -> Model:
    """Return the module of a graph that `differentiable` has made, with these deltas of its matrices."""
    return merge(graph, leaves, deltas, products=WideProducts(graph.precision.weights, keep))
