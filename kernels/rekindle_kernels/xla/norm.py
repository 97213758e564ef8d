"""RMS norm in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rekindle_kernels.ops.registry import Implementation, anything


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Implement `ops.norm.rms_norm`; `weight` broadcasts against x."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight).astype(x.dtype)


RMS_NORM = Implementation("xla", rms_norm, anything)
