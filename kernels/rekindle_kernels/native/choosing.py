"""The next token of each row of logits, as calls of JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rekindle_kernels.native.build import builds, ensure


def chooses(logits: jax.Array) -> bool:
    """Whether `largest_index` and `draw` take these."""
    return logits.dtype == jnp.float32 and builds("largest") and builds("draw")


def largest_index(logits: jax.Array) -> jax.Array:
    """The first index [N] of the largest of each row of logits [N, V]."""
    shape = jax.ShapeDtypeStruct((logits.shape[0],), jnp.int32)
    indices: jax.Array = jax.ffi.ffi_call(ensure("largest"), shape)(logits)
    return indices


def draw(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    block: int,
) -> jax.Array:
    """Tokens [N] drawn from logits [N, V], those of rows with temperature 0 by `largest_index`; seed is uint32 [N, 2],
    `block` how many tokens the first of a draw's two uniforms tells apart from others."""
    shape = jax.ShapeDtypeStruct((logits.shape[0],), jnp.int32)
    size = jnp.array([block], jnp.int32)
    tokens: jax.Array = jax.ffi.ffi_call(ensure("draw"), shape)(
        logits, temperature, top_k, top_p, min_p, seed, position, size
    )
    return tokens
