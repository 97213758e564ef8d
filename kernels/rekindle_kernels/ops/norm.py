"""RMS norm: `rms_norm(x, weight, eps)`."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from rekindle_kernels.ops.registry import Registry, current_platform

RMS_NORM = Registry("rms_norm")  # run(x, weight, eps) -> like x


@dataclass(frozen=True, slots=True)
class NormCall:
    """The static facts that select an implementation."""

    platform: str
    x: jax.ShapeDtypeStruct


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Compute x / sqrt(mean(x²) + eps) · weight in x's dtype; the mean is over the last axis, in float32."""
    call = NormCall(platform or current_platform(), jax.ShapeDtypeStruct(x.shape, x.dtype))
    normed: jax.Array = RMS_NORM.choose(call, implementation).run(x, weight, eps)
    return normed
