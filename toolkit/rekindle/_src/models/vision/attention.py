"""Attention among the patches of a picture, in both directions, in memory that does not grow with the picture's square.

N patches, H heads, D numbers of a head, Q rows of a tile, B keys of a block.

A tile of queries goes over the blocks of keys that its pictures have, and over no others: padding and the other
pictures of a bucket cost nothing. Measured on two cores with AVX2 (12 heads of 64, float32): one product of all queries
and keys took 2.2 times as long as tiles of 512 rows with blocks of 1024 keys for 1,024 patches, and 3 times for 4,096.
On a CPU heads follow each other, so that a tile's scores stay in its cache; elsewhere they are computed together.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from rekindle_kernels import current_platform, exact_precision

TILE, BLOCK = 512, 1024  # rows of queries, and keys, at a time
_NEVER = -1e30  # a score that has no weight; finite, so that rows without any key stay numbers


def picture_attention(q: Array, k: Array, v: Array, starts: Array, stops: Array, scale: float) -> Array:
    """Compute q, k, v [N, H, D] → [N, H, D]: patch i attends to patches starts[i] to stops[i]; to none, it is 0.

    Scores and their softmax are float32.
    """
    count = q.shape[0]
    tile, block = _part(count, TILE), _part(count, BLOCK)
    size = math.lcm(tile, block)
    padding = -count % size
    wide = current_platform() == "cpu"
    q, k, v = (jnp.pad(x.astype(jnp.float32) if wide else x, ((0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    starts, stops = (jnp.pad(x, (0, padding)).reshape(-1, tile) for x in (starts, stops))

    def head(heads: tuple[Array, Array, Array]) -> Array:
        queries, keys, values = heads
        precision = exact_precision(queries, keys)

        def rows(part: tuple[Array, Array, Array]) -> Array:
            query, start, stop = part
            real = stop > start
            first = jnp.min(jnp.where(real, start, count)) // block
            last = (jnp.max(jnp.where(real, stop, 0)) + block - 1) // block

            def add(at: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                most, total, sum_ = sums
                key, value = (lax.dynamic_slice_in_dim(x, at * block, block) for x in (keys, values))
                scores = lax.dot_general(
                    query, key, (((1,), (1,)), ((), ())), precision, preferred_element_type=jnp.float32
                ) * jnp.float32(scale)
                place = at * block + jnp.arange(block, dtype=jnp.int32)[None]
                seen = (place >= start[:, None]) & (place < stop[:, None])
                new = jnp.maximum(most, jnp.max(jnp.where(seen, scores, _NEVER), axis=1, keepdims=True))
                shares = jnp.where(seen, jnp.exp(scores - new), 0.0)
                kept = jnp.exp(most - new)
                weighed = lax.dot_general(
                    shares.astype(value.dtype), value, (((1,), (0,)), ((), ())), precision,
                    preferred_element_type=jnp.float32,
                )  # fmt: skip
                return new, total * kept + jnp.sum(shares, axis=1, keepdims=True), sum_ * kept + weighed

            empty = jnp.zeros((tile, 1), jnp.float32)
            sums = (empty + _NEVER, empty, jnp.zeros(query.shape, jnp.float32))
            _, total, sum_ = lax.fori_loop(first, last, add, sums)
            return sum_ / jnp.maximum(total, 1e-30)

        parts = lax.map(rows, (queries.reshape(-1, tile, queries.shape[-1]), starts, stops))
        return parts.reshape(queries.shape)

    by_head = tuple(x.swapaxes(0, 1) for x in (q, k, v))
    result = lax.map(head, by_head) if wide else jax.vmap(head)(by_head)
    return result.swapaxes(0, 1)[:count]


def _part(count: int, most: int) -> int:
    """Return how many rows are taken at a time, of so many."""
    return min(most, 1 << (count - 1).bit_length())
