"""Rotation of a step's queries and keys, and the writing of keys and values into pages, as calls of JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rekindle_kernels import pages
from rekindle_kernels.native.build import builds, unavailable_reason
from rekindle_kernels.native.calling import call
from rekindle_kernels.native.kernel_table import ROPE, WRITE_KV
from rekindle_kernels.pages import LayerKV

LANES = 16
WRITABLE = ("float32", "bfloat16")  # what pages may store: others need scales


def write(kv: LayerKV, k: jax.Array, v: jax.Array, page_ids: jax.Array, offsets: jax.Array) -> LayerKV:
    """Return `write_kv`; XLA's own scatter where pages are quantised."""
    known = kv.dtype.name in WRITABLE and kv.head_dim % LANES == 0 and kv.scales is None
    kernel = WRITE_KV.variant(kv.dtype.name)
    if not known or unavailable_reason() is not None or not builds(kernel.name):
        return pages.write_kv(kv, k, v, page_ids, offsets)
    (written,) = call(
        kernel,
        {
            "pages": kv.pages,
            "k": k.astype(jnp.float32),
            "v": v.astype(jnp.float32),
            "page_ids": page_ids,
            "offsets": offsets,
        },
    )
    return LayerKV(written)


def splits(qk: jax.Array, cos: jax.Array) -> bool:
    """True if `split` takes these."""
    D, F = qk.shape[-1], cos.shape[-1]
    usable = qk.ndim == 3 and qk.dtype == jnp.float32 and D % LANES == 0 and F % LANES == 0
    return usable and builds(ROPE.variant().name)


def split(
    qk: jax.Array,
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    norm: jax.Array | None = None,
    *,
    heads: int,
    eps: float = 0.0,
) -> tuple[jax.Array, ...]:
    """q [T, H, D] and k [T, K, D] of qk [T, ≥ H + K, D], rotated by cos and sin [T, F], and v [T, K, D] of qkv. With
    `norm` [H + K, D] q and k are divided by the root of their mean square and multiplied by it before. K may be 0."""
    kv_heads = (qkv.shape[1] - heads) // 2
    if kv_heads < 0 or qk.shape[1] < heads + kv_heads or 2 * cos.shape[-1] > qk.shape[-1] or not splits(qk, cos):
        raise ValueError(
            f"qk {list(qk.shape)}, qkv {list(qkv.shape)} and cos {list(cos.shape)} can't be split into {heads} heads"
        )
    operands = {"qk": qk, "qkv": qkv, "cos": cos, "sin": sin, "norm": norm}
    return call(ROPE.variant(), operands, {"eps": eps}, {"H": heads, "K": kv_heads})
