"""Pooling on the device: a chunk's hidden states as one vector for each prefill sequence.

Axes: S prefill sequences, T prefill tokens, E hidden size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def pooled_states(hidden: Array, cu_lengths: Array) -> Array:
    """Return float32 [2, S, E] for states [T, E]: the sum of each sequence's chunk, and its last token's state.

    `cu_lengths` [S + 1] are the half-open offsets of the sequences. The sums are a product with a matrix of ones and
    zeros. A state that is not finite is left out of it, and makes only its own sequence's sum NaN.
    """
    with jax.named_scope("pooling"):
        T, S = hidden.shape[0], cu_lengths.shape[0] - 1
        states = hidden.astype(jnp.float32)
        index = lax.iota(jnp.int32, T)
        members = (index >= cu_lengths[:-1, None]) & (index < cu_lengths[1:, None])  # [S, T]
        broken = ~jnp.isfinite(states).all(axis=-1)
        sums = jnp.dot(
            members.astype(jnp.float32),
            jnp.where(broken[:, None], 0.0, states),
            precision=lax.Precision.HIGHEST,
        )
        sums = jnp.where((members & broken).any(axis=1)[:, None], jnp.nan, sums)
        last = states[jnp.maximum(cu_lengths[1:] - 1, 0)]
        assert sums.shape == (S, hidden.shape[1])
        return jnp.stack([sums, last])
