"""Attention over blocks of keys, added one after another, as a native call."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from rekindle_kernels.native.build import builds
from rekindle_kernels.native.calling import NOT_BUILT, call, unavailable
from rekindle_kernels.native.cpu import has_amx
from rekindle_kernels.native.kernel_table import ADD_KEYS as TABLE
from rekindle_kernels.native.kernel_table import ADDED
from rekindle_kernels.ops.added_keys import AddKeysCall, AttentionSums
from rekindle_kernels.ops.registry import Implementation


def add_keys(
    sums: AttentionSums, q: Array, k: Array, v: Array, starts: Array, stops: Array, scale: float
) -> AttentionSums:
    """Implement `ops.added_keys.add_keys`."""
    operands = {
        **sums._asdict(), "q": q, "k": k, "v": v, "starts": starts.astype(jnp.int32), "stops": stops.astype(jnp.int32),
    }  # fmt: skip
    return AttentionSums(*call(TABLE.variant(q.dtype.name), operands, {"scale": scale, "amx": has_amx()}))


def supports(wanted: AddKeysCall) -> str | None:
    """Why keys can't be added natively: heads are float32 or bfloat16."""
    names = {wanted.q.dtype.name, wanted.k.dtype.name}
    if len(names) > 1 or not names <= {*ADDED}:
        return f"heads are {wanted.q.dtype.name} and {wanted.k.dtype.name}, not both float32 or both bfloat16"
    return unavailable(wanted) or (None if builds(TABLE.variant(wanted.q.dtype.name).name) else NOT_BUILT)


ADD_KEYS = Implementation("native", add_keys, supports)
