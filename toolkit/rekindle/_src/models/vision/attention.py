"""Attention among the patches of a picture, in both directions, key by key of a block after another.

M queries, N keys, H heads, D numbers of a head, K keys of a block.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from rekindle_kernels import AttentionSums, add_keys

BLOCK = 1024  # keys at a time


def picture_attention(q: Array, k: Array, v: Array, starts: Array, stops: Array, scale: float) -> Array:
    """Compute q [H, M, D], k and v [H, N, D] → [H, M, D]: query i attends to patches starts[i] to stops[i].

    The result is 0 for queries that attend to none. Scores and their softmax are float32.
    """
    block = min(BLOCK, k.shape[1])
    k, v = _padded(k, block), _padded(v, block)

    def add(at: Array, sums: AttentionSums) -> AttentionSums:
        first = at * block
        keys, values = (lax.dynamic_slice_in_dim(x, first, block, 1) for x in (k, v))
        return add_keys(sums, q, keys, values, starts - first, stops - first, scale)

    return lax.fori_loop(0, k.shape[1] // block, add, AttentionSums.none(*q.shape)).result


def _padded(x: Array, size: int) -> Array:
    """Return heads with zeros after their last patch, up to a multiple of `size`."""
    missing = -x.shape[1] % size
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0))) if missing else x
