"""Writing a step's keys and values into their pages: `write_kv(kv, k, v, page_ids, offsets)`.

Axes: T tokens, K kv heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rekindle_kernels.ops.registry import Registry, current_platform
from rekindle_kernels.pages import LayerKV, widened

WRITE_KV = Registry("write_kv")  # run(kv, k, v, page_ids, offsets) -> LayerKV


@dataclass(frozen=True, slots=True)
class WriteCall:
    """The static facts that select an implementation."""

    platform: str
    tokens: int
    kv_heads: int
    head_dim: int
    page_size: int
    kv_dtype: jnp.dtype  # LayerKV.dtype
    scaled: bool  # the pages carry scales
    latent: bool = False  # keys alone are written


def write_kv(
    kv: LayerKV,
    k: jax.Array,
    v: jax.Array | None,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> LayerKV:
    """Write token t's k[t], v[t] ([T, K, D]) to page page_ids[t] at offsets[t]; in place when the caller donates `kv`.

    Latent pages have keys alone, and v is None. Where the pages' vectors are wider than D, as on TPUs, zeros fill them.
    Values are rounded, or quantised with a scale per token and head, to the dtype of `kv`. Padding tokens write to
    page 0; which of two tokens with one destination wins is undefined.
    """
    assert kv.latent == (v is None), "latent pages, and only they, have no values"
    k, v = widened(k, kv), None if v is None else widened(v, kv)
    call = WriteCall(
        platform=platform or current_platform(),
        tokens=k.shape[0],
        kv_heads=kv.kv_heads,
        head_dim=kv.head_dim,
        page_size=kv.page_size,
        kv_dtype=kv.dtype,
        scaled=kv.scales is not None,
        latent=kv.latent,
    )
    with jax.named_scope("write_kv"):
        written: LayerKV = WRITE_KV.choose(call, implementation).run(kv, k, v, page_ids, offsets)
    return written
