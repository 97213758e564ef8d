"""Splitting and rotating fused projections.

Axes: T tokens, H query heads, K kv heads, D head size, F rotated frequencies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rekindle_kernels.ops.registry import Implementation, anything
from rekindle_kernels.xla.linear import rms_norm


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Return x [..., heads, D] with its first 2·F dimensions rotated, the first half of them against the second."""
    half = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if rest.shape[-1]:
        parts.append(rest.astype(parts[0].dtype))
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def rope(
    qk: jax.Array,
    qkv: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    norm: jax.Array | None = None,
    *,
    heads: int,
    eps: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Implement `ops.rope.rope`."""
    both = (qkv.shape[-2] + heads) // 2
    qk = qk if norm is None else rms_norm(qk[..., :both, :], norm, eps)
    q, k = qk[..., :heads, :], qk[..., heads:both, :]
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, k, qkv[..., both:, :]


ROPE = Implementation("xla", rope, anything)
