"""Pooling on the device: a chunk's hidden states as one vector for each prefill sequence.

Axes: S prefill sequences, T prefill tokens, E hidden size.
"""

from __future__ import annotations

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rekindle._src.core.records import Pooling as Kind
from rekindle._src.core.records import StepPlan
from rekindle._src.models.base import Model
from rekindle._src.programs.buckets import POOLS
from rekindle._src.programs.feature import Feature, Fields, Read, StepInputs

KINDS: tuple[str, ...] = get_args(Kind)


def pooled_states(hidden: Array, cu_lengths: Array) -> Array:
    """Return float32 [3, S, E] for states [T, E]: the sum of each sequence's chunk, its last state, and its first.

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
        first = states[jnp.minimum(cu_lengths[:-1], T - 1)]
        assert sums.shape == (S, hidden.shape[1])
        return jnp.stack([sums, last, first])  # in the order of KINDS


class Pooling(Feature):
    """Embeddings: the sums, the last and the first states of each prefill, in a program of their own variant."""

    variant, has_output, shard_axis = POOLS, True, 1

    def in_plan(self, plan: StepPlan) -> bool:
        return any(row.request.pooling is not None for row in plan.prefill)

    def output(self, model: Model, hidden: Array, inputs: StepInputs, own: Any, kept: Any) -> Array:
        return pooled_states(hidden[inputs.decode_rows :], inputs.cu_lengths)

    def read(self, read: Read, fields: Fields) -> None:
        assert read.output is not None, "a program that does not pool ran a request with pooling"
        for index, row in enumerate(read.plan.prefill):
            if row.request.pooling is not None:
                vector = read.output[KINDS.index(row.request.pooling), index].copy()
                fields[len(read.plan.decode) + index] |= {"pooled": vector, "finite": bool(np.isfinite(vector).all())}
