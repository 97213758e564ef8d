"""What implementations share: one layer's pages, the static facts of a call, the record that registers a kernel.

Axis legend, for the whole package: T tokens of the step, N sequences, R decode rows, H query heads, K kv heads,
G = H/K, D head size, P pages, S page size (tokens per page), W page-table width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class LayerKV(NamedTuple):
    """One layer's keys and values; a pytree whose leaves the step donates.

    `pages[p, 0]` holds keys and `pages[p, 1]` values, head-major. They share an array because then one scatter writes
    both (2 rows, 30 layers, XLA:CPU: 0.31 ms instead of 0.43) and a step donates half as many leaves. A uint16 leaf
    holds the bits of bfloat16: XLA:CPU has no bfloat16 scatter or dynamic update and would widen the WHOLE array to
    float32 and back for every write (6 MB of pages: 3.8 ms a layer instead of 0.02).
    """

    pages: jax.Array  # [P, 2, K, S, D]
    scales: jax.Array | None = None  # float32 [P, 2, K, S]: one factor per token and head of int8 or fp8 pages

    @property
    def dtype(self) -> jnp.dtype:
        """The type that the values mean, whatever type stores their bits."""
        return jnp.dtype(jnp.bfloat16) if self.pages.dtype == jnp.uint16 else self.pages.dtype

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.pages.shape[2]

    @property
    def page_size(self) -> int:
        return self.pages.shape[3]

    @property
    def head_dim(self) -> int:
        return self.pages.shape[4]


def storage_dtype(dtype: DTypeLike, platform: str) -> jnp.dtype:
    """The type of the array that stores pages of `dtype` on `platform`."""
    return jnp.dtype(jnp.uint16) if platform == "cpu" and jnp.dtype(dtype) == jnp.bfloat16 else jnp.dtype(dtype)


def needs_scales(dtype: DTypeLike) -> bool:
    """Pages of one byte carry a scale per token and head."""
    return jnp.dtype(dtype).itemsize == 1


@dataclass(frozen=True, slots=True)
class Call:
    """The static facts of one `paged_attention` or `write_kv` call: what an implementation may refuse by."""

    platform: str  # "cpu", "gpu", "tpu"
    tokens: int  # T
    decode_rows: int  # R; tokens - decode_rows are prefill tokens
    sequences: int  # N
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    table_width: int
    q_dtype: jnp.dtype
    kv_dtype: jnp.dtype  # LayerKV.dtype: bfloat16 for pages stored as uint16
    storage: jnp.dtype  # the dtype of LayerKV.pages
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class Implementation:
    """A kernel and what it can do. `supports` returns None, or the reason why it can't serve the call.

    `attention(q, kv, page_table, kv_lens, cu_q_lens, num_prefills, *, decode_rows, scale, sliding_window, soft_cap,
    sinks) -> [T, H, D]`; `write(kv, k, v, page_ids, offsets) -> LayerKV`, or None where XLA's scatter is to be used.
    """

    name: str
    attention: Callable[..., jax.Array]
    supports: Callable[[Call], str | None]
    write: Callable[..., LayerKV] | None = None
