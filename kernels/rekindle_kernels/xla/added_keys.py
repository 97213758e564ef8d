"""Attention that takes keys block by block, in plain JAX.

On a CPU heads follow each other, so that a head's scores stay in its cache: on an EPYC with AVX2 (16 heads of 64,
float32), 512 queries and 512 keys took 36 ms of a core, and 59 ms with all heads together. Elsewhere they run together.
Products of bfloat16 are those of float32 but where a CPU has AMX: on a Xeon that has it 10.5 ms in place of 14.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from rekindle_kernels.ops.added_keys import NEVER, AttentionSums
from rekindle_kernels.ops.programs import traits
from rekindle_kernels.ops.registry import Implementation, anything, current_platform
from rekindle_kernels.xla.linear import exact_precision


def add_keys(
    sums: AttentionSums, q: Array, k: Array, v: Array, starts: Array, stops: Array, scale: float
) -> AttentionSums:
    """Implement `ops.added_keys.add_keys`."""
    one = functools.partial(_add, starts=starts, stops=stops)
    cpu = current_platform() == "cpu"
    if cpu and not (q.dtype == jnp.bfloat16 and traits().fast_bfloat16):
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    q = q * jnp.asarray(scale, q.dtype)
    if cpu:
        return lax.map(lambda parts: one(*parts), (sums, q, k, v))
    return jax.vmap(one)(sums, q, k, v)


def _add(sums: AttentionSums, q: Array, k: Array, v: Array, *, starts: Array, stops: Array) -> AttentionSums:
    """Add the keys of one head."""
    precision = exact_precision(q, q)
    scores = _product(q, k, 1, precision)
    place = jnp.arange(k.shape[0], dtype=jnp.int32)[None]
    seen = (place >= starts[:, None]) & (place < stops[:, None])
    new = jnp.maximum(sums.most, jnp.max(jnp.where(seen, scores, NEVER), axis=1, keepdims=True))
    shares = jnp.where(seen, jnp.exp(scores - new), 0.0)
    kept = jnp.exp(sums.most - new)
    added = _product(shares.astype(v.dtype), v, 0, precision)
    total = sums.total * kept + jnp.sum(shares, axis=1, keepdims=True)
    return AttentionSums(new, total, sums.weighed * kept + added)


def _product(x: Array, y: Array, axis: int, precision: lax.Precision | None) -> Array:
    """Return x [M, N] · y, contracted over this axis of y, as float32."""
    return lax.dot_general(x, y, (((1,), (axis,)), ((), ())), precision, preferred_element_type=jnp.float32)


ADD_KEYS = Implementation("xla", add_keys, anything)
