"""Few rows times a matrix, as a call of JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from rekindle_kernels.native.build import ensure

MOST_ROWS = 8  # up to which reading the matrix is what a product waits for; beyond them XLA's own products win

DTYPES = ("float32", "bfloat16", "float16", "int8")


def multiplies(dtype: DTypeLike) -> bool:
    """Whether `matvec` takes weights of `dtype`."""
    return jnp.dtype(dtype).name in DTYPES


def matvec(x: jax.Array, weight: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """Few rows x [R, K] · weight [N, K] · scale [N] -> float32 [R, N]."""
    shape = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    factors = jnp.ones((1,), jnp.float32) if scale is None else scale
    call = jax.ffi.ffi_call(ensure(f"matvec_{weight.dtype.name}"), shape)
    product: jax.Array = call(weight, factors, x.astype(jnp.float32))
    return product
