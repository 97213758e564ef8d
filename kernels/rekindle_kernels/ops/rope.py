"""Rotary embedding of fused projections: `rope(qk, qkv, …)` returns queries and keys, rotated, and values.

Axes: T tokens, H query heads, K kv heads, D head size, F rotated frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from rekindle_kernels.ops.registry import Registry, current_platform

ROPE = Registry("rope")  # run(qk, qkv, cos, sin, norm, heads=…, eps=…) -> q, k, v


@dataclass(frozen=True, slots=True)
class RopeCall:
    """The static facts that select an implementation."""

    platform: str
    qk: jax.ShapeDtypeStruct
    cos: jax.ShapeDtypeStruct | None  # None: heads are only split, not rotated
    norm: bool
    kv_heads: int = 1


def rope(
    qk: jax.Array,
    qkv: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    *,
    heads: int,
    norm: jax.Array | None = None,
    eps: float = 0.0,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return q [T, H, D] and k [T, K, D] of qk [T, ≥ H + K, D], rotated by cos and sin [T, F], and v [T, K, D] of qkv.

    `heads` is H, and qkv [T, H + 2·K, D] has queries, keys and values in this order; K may be 0. With `norm`
    [H + K, D] queries and keys are first RMS-normed, head by head. Without cos and sin they are not rotated.
    """
    call = RopeCall(
        platform or current_platform(),
        jax.ShapeDtypeStruct(qk.shape, qk.dtype),
        None if cos is None else jax.ShapeDtypeStruct(cos.shape, cos.dtype),
        norm is not None,
        (qkv.shape[-2] - heads) // 2,
    )
    q, k, v = ROPE.choose(call, implementation).run(qk, qkv, cos, sin, norm, heads=heads, eps=eps)
    return q, k, v
