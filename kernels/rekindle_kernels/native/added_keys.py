"""Attention over blocks of keys, added one after another, as a native call."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from rekindle_kernels.native.build import builds
from rekindle_kernels.native.calling import NOT_BUILT, call, unavailable
from rekindle_kernels.native.kernel_table import ADD_KEYS as TABLE
from rekindle_kernels.ops.added_keys import AddKeysCall, AttentionSums
from rekindle_kernels.ops.registry import Implementation


def add_keys(
    sums: AttentionSums, q: Array, k: Array, v: Array, starts: Array, stops: Array, scale: float
) -> AttentionSums:
    """Implement `ops.added_keys.add_keys`."""
    operands = {
        **sums._asdict(), "q": q, "k": k, "v": v, "starts": starts.astype(jnp.int32), "stops": stops.astype(jnp.int32),
    }  # fmt: skip
    return AttentionSums(*call(TABLE.variant(), operands, {"scale": scale}))


def supports(wanted: AddKeysCall) -> str | None:
    """Why keys can't be added natively: heads are float32."""
    if wanted.q.dtype != jnp.float32 or wanted.k.dtype != jnp.float32:
        return f"heads are {wanted.q.dtype.name} and {wanted.k.dtype.name}, not float32"
    return unavailable(wanted) or (None if builds(TABLE.variant().name) else NOT_BUILT)


ADD_KEYS = Implementation("native", add_keys, supports)
