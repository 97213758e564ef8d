"""Rows of several experts, each times its expert's matrix: `grouped_linear(x, weight, sizes)`.

Axes: M rows, sorted by expert, G experts, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from rekindle_kernels.ops.registry import Registry, current_platform

GROUPED_LINEAR = Registry("grouped_linear")  # run(x, weight, sizes, scale, minimum, dtype) -> [M, O]


@dataclass(frozen=True, slots=True)
class GroupedCall:
    """The static facts that select an implementation."""

    platform: str
    x: jax.ShapeDtypeStruct
    weight: jax.ShapeDtypeStruct
    scale: str | None = None  # the dtype of its scales, if it is stored in the form of `rekindle_kernels.int4`


def grouped_linear(
    x: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    *,
    scale: jax.Array | None = None,
    minimum: jax.Array | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Compute x [M, I] → [M, O] in `dtype`: `sizes[0]` rows times `weight[0]`, then `sizes[1]` times `weight[1]`, …

    Rows beyond the sum of `sizes` are undefined. Weights of int8 are widened to x's type, exactly; with
    rows of int8 as well, sums are integers and `dtype` is int32. With a `scale`, and perhaps a `minimum`, these are the
    arrays of `rekindle_kernels.int4`, for a stack of matrices.
    """
    x_shape, shape = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, weight))
    call = GroupedCall(platform or current_platform(), x_shape, shape, None if scale is None else scale.dtype.name)
    run = GROUPED_LINEAR.choose(call, implementation).run
    result: jax.Array = run(x, weight, sizes, scale, minimum, jnp.dtype(dtype))
    return result
