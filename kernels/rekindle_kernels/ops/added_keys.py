"""Attention that takes keys block by block: `add_keys(sums, q, k, v, starts, stops, scale)`, in both directions.

The values that queries attend to are summed over blocks of keys: memory does not grow with the square of their number,
and a long row of patches can be attended to in steps of a bounded size.

Axes: M queries, N keys of a block, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rekindle_kernels.ops.registry import Registry, current_platform

ADD_KEYS = Registry("add_keys")  # run(sums, q, k, v, starts, stops, scale) -> AttentionSums
NEVER = -1e30  # a score that has no weight; finite, so that rows without any key stay numbers


class AttentionSums(NamedTuple):
    """The softmax of queries over the keys so far, float32."""

    most: Array  # [H, M, 1]: the score that weights are relative to, in a unit of the implementation's
    total: Array  # [H, M, 1]: the sum of weights
    weighed: Array  # [H, M, D]: values by their weights

    @classmethod
    def none(cls, heads: int, queries: int, size: int) -> AttentionSums:
        """Return the sums over no keys."""
        one = jnp.zeros((heads, queries, 1), jnp.float32)
        return cls(one + NEVER, one, jnp.zeros((heads, queries, size), jnp.float32))

    @property
    def result(self) -> Array:
        """The attended values [H, M, D]; 0 for queries that attend to nothing."""
        return self.weighed / jnp.maximum(self.total, 1e-30)


@dataclass(frozen=True, slots=True)
class AddKeysCall:
    """The static facts that select an implementation."""

    platform: str
    q: jax.ShapeDtypeStruct
    k: jax.ShapeDtypeStruct


def add_keys(
    sums: AttentionSums,
    q: Array,
    k: Array,
    v: Array,
    starts: Array,
    stops: Array,
    scale: float,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> AttentionSums:
    """Add keys and values [H, N, D] to the sums of queries q [H, M, D]: query i sees keys starts[i] to stops[i].

    `starts` and `stops` [M] are int32 and may lie outside of the block. Scores and their softmax are float32.
    """
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k))
    chosen = ADD_KEYS.choose(AddKeysCall(platform or current_platform(), *shapes), implementation)
    with jax.named_scope(f"add_keys_{chosen.name}"):
        added: AttentionSums = chosen.run(sums, q, k, v, starts, stops, scale)
    return added
