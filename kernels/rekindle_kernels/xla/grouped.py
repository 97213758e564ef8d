"""Rows of several experts as XLA's ragged product, which a TPU computes as such.

XLA:CPU and XLA:GPU multiply all rows with all experts: with 128 of them, 8 to a token, that is 16 times the work.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rekindle_kernels import int4
from rekindle_kernels.ops.registry import Implementation, anything
from rekindle_kernels.xla.linear import exact_precision


def run(
    x: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    scale: jax.Array | None,
    minimum: jax.Array | None,
    dtype: jnp.dtype,
) -> jax.Array:
    """Implement `ops.grouped.grouped_linear`; rows beyond the sum of `sizes` are zero."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    weight = weight.astype(x.dtype) if scale is None else int4.dequantized(weight, scale, minimum, x.dtype)
    precision = exact_precision(x, weight)
    return jax.lax.ragged_dot_general(x, weight, sizes, numbers, precision, preferred_element_type=dtype)


GROUPED = Implementation("xla", run, anything)
