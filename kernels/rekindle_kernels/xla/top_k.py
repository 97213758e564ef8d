"""The largest values of each row, without sorting the row.

Axes: N rows, V values, B blocks of a row.

An element that is among the k best of its row lies in one of the k blocks with the best maxima: each better block holds
an element that is better. So a row is folded to its block maxima until they are few, and each level hands k blocks
down to the one below. One pass reads [N, V]; at most 64 · 32 values are sorted, by one kernel on a GPU, where sorting a
row of 152k values takes 30 kernels, each of which reads and writes [N, V].
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from rekindle_kernels.ops.registry import Implementation, anything

BLOCK = 32


def top_k(values: Array, k: int) -> tuple[Array, Array]:
    """Implement `ops.sampling.top_k` by XLA: a partial sort on CPU, an instruction on TPU, a whole sort on GPU."""
    largest, indices = lax.top_k(values, k)
    return largest, indices


def top_k_of_blocks(values: Array, k: int) -> tuple[Array, Array]:
    """Implement `ops.sampling.top_k` by blocks: the same numbers at the same places.

    Zeros of both signs are equal to a maximum and not to a sort: where a row has both, other zeros may be named.
    """
    width = values.shape[-1]
    if width <= 2 * k * BLOCK:
        return top_k(values, k)
    missing = -width % BLOCK
    padded = jnp.pad(values, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    maxima = padded.reshape(values.shape[0], -1, BLOCK).max(axis=-1)
    _, blocks = top_k_of_blocks(maxima, k)
    # In ascending order, so that of equal values the first in the row comes first.
    blocks = lax.sort(blocks, dimension=1)
    indices = (blocks[:, :, None] * BLOCK + lax.iota(jnp.int32, BLOCK)).reshape(values.shape[0], -1)
    candidates = jnp.take_along_axis(values, jnp.minimum(indices, width - 1), axis=1)
    candidates = jnp.where(indices < width, candidates, -jnp.inf)
    largest, places = top_k(candidates, k)
    return largest, jnp.take_along_axis(indices, places, axis=1)


TOP_K = Implementation("xla", top_k, anything)
BLOCKS = Implementation("blocks", top_k_of_blocks, anything)
