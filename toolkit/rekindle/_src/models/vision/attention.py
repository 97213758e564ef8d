"""Attention among the patches of a picture, in both directions, in memory that does not grow with the picture's square.

N patches, M queries, H heads, D numbers of a head, Q rows of a tile, K keys of a block.

A tile of queries goes over the blocks of keys that its pictures have, and over no others: padding and the other
pictures of a bucket cost nothing. Measured on a processor with AVX2 (12 heads of 64, float32): one product of all
queries and keys took 2.2 times as long as tiles of 512 rows with blocks of 1024 keys for 1,024 patches, and 3 times for
4,096. On a CPU heads follow each other, so that a tile's scores stay in its cache; elsewhere they run together.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from rekindle_kernels import current_platform, exact_precision

TILE, BLOCK = 512, 1024  # rows of queries, and keys, at a time
Blocks = Callable[[Array], tuple[Array, Array]]  # the number of a block → its keys and values [K, D]
_NEVER = -1e30  # a score that has no weight; finite, so that rows without any key stay numbers


def picture_attention(q: Array, k: Array, v: Array, starts: Array, stops: Array, scale: float) -> Array:
    """Compute q [H, M, D], k and v [H, N, D] → [M, H, D]: query i attends to patches starts[i] to stops[i].

    The result is 0 for queries that attend to none. Scores and their softmax are float32.
    """
    queries, count, size = q.shape[1], k.shape[1], q.shape[2]
    tile, block = _part(queries, TILE), _part(count, BLOCK)
    cpu = current_platform() == "cpu"
    if cpu:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    q, k, v = _padded(q * jnp.asarray(scale, q.dtype), tile, 1), _padded(k, block, 1), _padded(v, block, 1)
    starts, stops = (_padded(x, tile, 0).reshape(-1, tile) for x in (starts, stops))
    last = k.shape[1]

    def head(query: Array, blocks: Blocks) -> Array:
        def rows(part: tuple[Array, Array, Array]) -> Array:
            return _tile(*part, blocks=blocks, block=block, count=last)

        return lax.map(rows, (query.reshape(-1, tile, size), starts, stops)).reshape(query.shape)

    def one_head(number: Array) -> Array:
        """Compute one head whose blocks are read in place: a copy of all of its keys would cost more than a tile."""

        def blocks(at: Array) -> tuple[Array, Array]:
            place, shape = (number, at * block, jnp.int32(0)), (1, block, size)
            return lax.dynamic_slice(k, place, shape)[0], lax.dynamic_slice(v, place, shape)[0]

        return head(lax.dynamic_index_in_dim(q, number, keepdims=False), blocks)

    def each_head(query: Array, key: Array, value: Array) -> Array:
        def blocks(at: Array) -> tuple[Array, Array]:
            first = at * block
            return lax.dynamic_slice_in_dim(key, first, block), lax.dynamic_slice_in_dim(value, first, block)

        return head(query, blocks)

    result = lax.map(one_head, jnp.arange(q.shape[0])) if cpu else jax.vmap(each_head)(q, k, v)
    return result.swapaxes(0, 1)[:queries]


def _tile(query: Array, start: Array, stop: Array, *, blocks: Blocks, block: int, count: int) -> Array:
    """Compute one head of a tile's queries [Q, D], block of keys by block."""
    precision, real = exact_precision(query, query), stop > start
    first = jnp.min(jnp.where(real, start, count)) // block
    last = (jnp.max(jnp.where(real, stop, 0)) + block - 1) // block

    def add(at: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        most, total, weighed = sums
        key, value = blocks(at)
        scores = _product(query, key, 1, precision)
        place = at * block + jnp.arange(block, dtype=jnp.int32)[None]
        seen = (place >= start[:, None]) & (place < stop[:, None])
        new = jnp.maximum(most, jnp.max(jnp.where(seen, scores, _NEVER), axis=1, keepdims=True))
        shares = jnp.where(seen, jnp.exp(scores - new), 0.0)
        kept = jnp.exp(most - new)
        added = _product(shares.astype(value.dtype), value, 0, precision)
        return new, total * kept + jnp.sum(shares, axis=1, keepdims=True), weighed * kept + added

    empty = jnp.zeros((query.shape[0], 1), jnp.float32)
    sums = (empty + _NEVER, empty, jnp.zeros(query.shape, jnp.float32))
    _, total, weighed = lax.fori_loop(first, last, add, sums)
    return weighed / jnp.maximum(total, 1e-30)


def _product(x: Array, y: Array, axis: int, precision: lax.Precision | None) -> Array:
    """Return x [Q, K] · y, contracted over this axis of y, as float32."""
    return lax.dot_general(x, y, (((1,), (axis,)), ((), ())), precision, preferred_element_type=jnp.float32)


def _padded(x: Array, size: int, axis: int) -> Array:
    """Return x with zeros at the end of an axis, up to a multiple of `size`."""
    missing = -x.shape[axis] % size
    return jnp.pad(x, [(0, missing if at == axis else 0) for at in range(x.ndim)]) if missing else x


def _part(count: int, most: int) -> int:
    """Return how many rows are taken at a time, of so many."""
    return min(most, 1 << (count - 1).bit_length())
