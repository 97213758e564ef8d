"""Rows of several experts, each times the matrix of its own: `grouped_linear(x, weight, sizes)`.

Axes: M rows, sorted by expert, G experts, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from rekindle_kernels.ops.registry import Registry, current_platform

GROUPED_LINEAR = Registry("grouped_linear")  # run(x, weight, sizes, dtype) -> [M, O]


@dataclass(frozen=True, slots=True)
class GroupedCall:
    """The static facts by which an implementation is chosen."""

    platform: str
    x: jax.ShapeDtypeStruct
    weight: jax.ShapeDtypeStruct


def grouped_linear(
    x: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    *,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """x [M, I] → [M, O] in `dtype`: `sizes[0]` rows times `weight[0]`, then `sizes[1]` times `weight[1]`, …

    What becomes of rows beyond the sum of `sizes` is undefined. Weights of int8 are widened to x's type, exactly; with
    rows of int8 as well, sums are integers and `dtype` is int32.
    """
    x_shape, shape = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, weight))
    call = GroupedCall(platform or current_platform(), x_shape, shape)
    found: jax.Array = GROUPED_LINEAR.choose(call, implementation).run(x, weight, sizes, jnp.dtype(dtype))
    return found
