"""Few rows times a matrix, as a call of JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rekindle_kernels.native.build import builds, ensure, has_feature

FEW_ROWS = 4  # float32 arithmetic on them is faster than reading the matrix, whatever its weights are
SOME_ROWS = 8  # it still beats XLA, which packs the matrix first
MANY_ROWS = 48  # up to which the instruction for pairs of bfloat16 does; XLA's packing pays for more
DTYPES = ("float32", "bfloat16", "float16", "int8")


def multiplies(rows: int, weight: jax.Array) -> bool:
    """Whether `matvec` takes so many rows and this weight, and is faster than XLA."""
    name = _kernel(rows, weight)
    return name is not None and builds(name)


def _kernel(rows: int, weight: jax.Array) -> str | None:
    """The kernel's name; None where XLA is better."""
    if weight.ndim != 2 or weight.dtype.name not in DTYPES:
        return None
    if FEW_ROWS < rows <= MANY_ROWS and _in_pairs(weight):
        return "pairs_bfloat16"
    return f"matvec_{weight.dtype.name}" if rows <= SOME_ROWS else None


def _in_pairs(weight: jax.Array) -> bool:
    N, K = weight.shape
    return weight.dtype == jnp.bfloat16 and K % 32 == 0 and N % 4 == 0 and has_feature("avx512bf16")


def matvec(x: jax.Array, weight: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """A few rows x [R, K] · weight [N, K] · scale [N] -> float32 [R, N]."""
    name, shape = _kernel(x.shape[0], weight), jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    assert name is not None, f"{x.shape[0]} rows times {weight.dtype}{list(weight.shape)} are XLA's"
    call = jax.ffi.ffi_call(ensure(name), shape)
    product: jax.Array
    if name == "pairs_bfloat16":
        product = call(weight, x.astype(jnp.bfloat16))
    else:
        factors = jnp.ones((1,), jnp.float32) if scale is None else scale
        product = call(weight, factors, x.astype(jnp.float32))
    return product
