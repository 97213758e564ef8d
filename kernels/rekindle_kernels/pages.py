"""Pages of keys and values: storing them, writing by one scatter, quantising narrow ones, and moving them.

Axis legend, for the whole package: T tokens of the step, N sequences, R decode rows, H query heads, K kv heads,
G = H/K, D head size, P pages, S page size (tokens per page), W page-table width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from rekindle_kernels.packed_pages import (
    PackedDtype,
    bits_of,
    format_of,
    packed_dtype,
    quantize_four_bits,
    rotate,
    unpack,
)

LANES = 128  # of a TPU's registers and tiles
_HELD = {"uint16": "bfloat16", "uint8": "float8_e4m3fn"}  # the dtypes whose bits a leaf holds, on CPU


class LayerKV(NamedTuple):
    """One layer's keys and values; a pytree. A step donates its leaves.

    `pages[p, 0]` holds keys and `pages[p, 1]` values, head-major; latent pages hold keys alone. They share an array
    because then one scatter writes both (2 rows, 30 layers, XLA:CPU: 0.31 ms instead of 0.43) and a step donates half
    as many leaves. A uint16 leaf holds the bits of bfloat16, a uint8 leaf those of float8_e4m3fn: XLA:CPU has no
    scatter or dynamic update of them and would widen the WHOLE array to float32 and back for every write (6 MB of
    pages: 3.8 ms a layer instead of 0.02).
    """

    pages: Array  # [P, 2, K, S, D], or [P, 1, K, S, D]
    scales: Array | None = None  # float32 [P, 2 or 1, K, S]: one factor per token and head of narrow pages
    values: Array | None = None  # uint8 [P, 1, K, S, D/2] of packed pages, whose `pages` [P, 1, K, S, …] are keys alone
    bounds: Array | None = None  # [P, 2, K, D]: the smallest and the largest numbers of each page's keys, in bfloat16

    @property
    def dtype(self) -> jnp.dtype | PackedDtype:
        """The dtype of the numbers; `pages` may hold their bits under another."""
        if self.values is not None:
            return format_of(self.pages, self.values)
        return jnp.dtype(_HELD.get(self.pages.dtype.name, self.pages.dtype))

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]

    @property
    def latent(self) -> bool:
        """True if values are a part of the keys."""
        return self.pages.shape[1] == 1 and self.values is None

    @property
    def integers(self) -> bool:
        """True if the numbers are integers, which scales multiply."""
        return self.values is not None or self.pages.dtype == jnp.int8

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of numbers [P, parts, K, S, …]. Their parts, one after the other, are keys and values."""
        return (self.pages,) if self.values is None else (self.pages, self.values)

    @property
    def kv_heads(self) -> int:
        return self.pages.shape[2]

    @property
    def page_size(self) -> int:
        return self.pages.shape[3]

    @property
    def head_dim(self) -> int:
        """The width of the stored vectors, at least as large as the head dimension of the keys written to them."""
        return self.pages.shape[4] if self.values is None else 2 * self.values.shape[4]

    def part(self, number: int) -> tuple[Array, int]:
        """Return the array with keys, 0, or values, 1, and their place on its second axis. Latent pages are both."""
        if self.values is not None:
            return self.arrays[number], 0
        return self.pages, 0 if self.latent else number


def storage_dtype(dtype: DTypeLike, platform: str) -> jnp.dtype:
    """Return the type of the array that stores pages of `dtype` on `platform`."""
    name = jnp.dtype(dtype).name
    names = (bits for bits, held in _HELD.items() if held == name and platform == "cpu")
    return jnp.dtype(next(names, name))


def stored_head_dim(head_dim: int, platform: str) -> int:
    """Return the width of a vector in the pages: on TPUs whole rows of 128 lanes, filled with zeros.

    The tiles of memory are as wide anyway. With fewer columns XLA stores pages in another order than kernels read, and
    copies the whole cache in every layer (2 GiB of pages a layer, D = 64: 12 GiB of temporary memory).
    """
    return -(-head_dim // LANES) * LANES if platform == "tpu" else head_dim


def needs_scales(dtype: DTypeLike) -> bool:
    """True if pages of this dtype, at most a byte per number, carry a scale per token and head."""
    return packed_dtype(dtype) is not None or jnp.dtype(dtype).itemsize == 1


def largest_magnitude(values: Array, least: float = 0.0) -> Array:
    """Return the largest |x| of the last axis [..., 1] in float32, at least `least`; NaN if an x is NaN.

    Magnitudes sort like their bits, NaN above all others. XLA:CPU's maximum of floats loses a NaN among other numbers,
    and integers, which the numbers become, would hide it.
    """
    bits = lax.bitcast_convert_type(jnp.abs(values.astype(jnp.float32)), jnp.int32)
    floor = int(np.float32(least).view(np.int32))
    return lax.bitcast_convert_type(jnp.maximum(bits.max(axis=-1, keepdims=True), floor), jnp.float32)


def quantize(values: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Return values [..., D] as `dtype`, and a float32 scale per vector that maps its largest |x| to the type's."""
    integer, values = jnp.issubdtype(dtype, jnp.integer), values.astype(jnp.float32)
    scales = jnp.max(jnp.abs(values), axis=-1) / float(jnp.iinfo(dtype).max if integer else jnp.finfo(dtype).max)
    steps = values / jnp.where(scales == 0, 1, scales)[..., None]
    return (jnp.round(steps) if integer else steps).astype(dtype), scales


def as_stored(values: Array, kv: LayerKV) -> Array:
    """Return values in the type of the array that stores `kv`'s pages."""
    values = values.astype(kv.dtype)
    return values if kv.pages.dtype == kv.dtype else lax.bitcast_convert_type(values, kv.pages.dtype)


def as_values(stored: Array, kv: LayerKV) -> Array:
    """Return numbers read from `kv`'s pages in the dtype of its values, without applying scales; codes become int8."""
    if kv.values is not None:
        return unpack(stored) if bits_of(stored) == 4 else stored
    return stored if stored.dtype == kv.dtype else lax.bitcast_convert_type(stored, kv.dtype)


def widened(vectors: Array, kv: LayerKV) -> Array:
    """Return vectors [..., D] padded with zeros to the width that `kv` stores."""
    missing = kv.head_dim - vectors.shape[-1]
    return jnp.pad(vectors, [(0, 0)] * (vectors.ndim - 1) + [(0, missing)]) if missing else vectors


def turned(vectors: Array, kv: LayerKV) -> Array:
    """Return queries, keys, values or results [..., D] as `kv` stores its vectors, or back again: the same rotation
    does both. Only packed pages are rotated.
    """
    return vectors if kv.values is None else rotate(vectors)


def _written(kv: LayerKV, k: Array, v: Array | None) -> LayerKV:
    """Return keys, and values where they are stored, as the pages store them: leaves [T, parts, K, …]."""
    if kv.values is not None:
        assert v is not None, "packed pages have values"
        halves = [rotate(x.astype(jnp.float32)) for x in (k, v)]
        (keys, key_scales), (values, value_scales) = (
            quantize_four_bits(half) if bits_of(array) == 4 else quantize(half, array.dtype)
            for half, array in zip(halves, kv.arrays, strict=True)
        )
        return LayerKV(keys[:, None], jnp.stack([key_scales, value_scales], axis=1), values[:, None])
    numbers, scales = k[:, None] if v is None else jnp.stack([k, v], axis=1), None
    if kv.scales is not None:
        numbers, scales = quantize(numbers, jnp.dtype(kv.dtype))
    return LayerKV(as_stored(numbers, kv), scales)


def write_kv(kv: LayerKV, k: Array, v: Array | None, page_ids: Array, offsets: Array) -> LayerKV:
    """Implement `ops.attention.write_kv` as one XLA scatter of each leaf."""

    def put(leaf: Array, new: Array) -> Array:
        # Ids come from the scheduler; without the promise XLA adds a bounds check per token.
        return leaf.at[page_ids, :, :, offsets].set(new, mode="promise_in_bounds")

    return jax.tree.map(put, kv, _written(kv, k, v))


def write_kv_rows(kv: LayerKV, k: Array, v: Array | None, page_ids: Array, offsets: Array) -> LayerKV:
    """Write as `write_kv`, by a scatter of rows [D] into pages seen as one matrix, which on TPUs is the same memory.

    XLA:TPU takes an order of dimensions that suits the scatter, and copies all pages to and from it where a layer has a
    single kv head. A matrix has one order only.
    """

    def put(leaf: Array, new: Array) -> Array:
        if leaf.ndim == 4:  # scales
            return leaf.at[page_ids, :, :, offsets].set(new, mode="promise_in_bounds")
        vectors, width = leaf.shape[1] * leaf.shape[2], leaf.shape[4]
        first = page_ids[:, None] * vectors + jnp.arange(vectors, dtype=jnp.int32)
        rows = (first * kv.page_size + offsets[:, None]).reshape(-1)
        flat = leaf.reshape(-1, width).at[rows].set(new.reshape(-1, width), mode="promise_in_bounds")
        return flat.reshape(leaf.shape)

    return jax.tree.map(put, kv, _written(kv, k, v))


def gather_pages(kv: LayerKV, ids: Array) -> LayerKV:
    """Return the pages `ids` ([n] int32) as a LayerKV of n pages, the form that offload and snapshots store."""
    return jax.tree.map(lambda leaf: leaf.at[ids].get(mode="promise_in_bounds"), kv)


def scatter_pages(kv: LayerKV, ids: Array, pages: Sequence[LayerKV]) -> LayerKV:
    """Put `pages`, each a LayerKV of one page, at `ids` ([n] int32); ids that pad the batch are 0, the scratch page.

    Each is put by itself, since they lie apart: joining them first costs more than putting them in their places (48
    pages in 32 layers, 63 MB, on two cores: 6 ms as here, 11 ms joined in the program, 30 ms and more joined by the
    host).
    """
    for index, page in enumerate(pages):
        kv = jax.tree.map(lambda leaf, one, at=ids[index]: lax.dynamic_update_slice_in_dim(leaf, one, at, 0), kv, page)
    return kv
