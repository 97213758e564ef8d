"""The common parts of the GPU attention kernels: reading a block of paged keys, scoring it, and the online softmax.

Axes: M tile rows, B keys of a block, D head_dim (padded to a power of two inside a tile), S page size. Triton wants
every tile to be a power of two in size, dots to be at least 16 wide, and masks where a tile overhangs its array.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

LOG2E = math.log2(math.e)
# A finite start for running maxima: with -inf a row with only masked keys would compute exp2(-inf - -inf) = nan.
LOWEST = -1e30
# The half of a page; numpy scalars, because interpret mode reads the shape of every index.
K, V = np.int32(0), np.int32(1)


@dataclasses.dataclass(frozen=True)
class LogitScaling:
    """The conversion of raw dot products to logits; static in every kernel."""

    scale: float
    soft_cap: float | None
    sliding_window: int | None
    emulated: bool  # interpret mode, on devices that may lack TF32

    @property
    def exponent(self) -> float:
        """The factor that makes a score an exponent of two."""
        return LOG2E * (self.scale if self.soft_cap is None else self.soft_cap)

    def score(self, raw: Array) -> Array:
        return raw if self.soft_cap is None else jnp.tanh(raw * (self.scale / self.soft_cap))

    def dot(self, left: Array, right: Array, *, contract_right: int) -> Array:
        return product(left, right, contract_right=contract_right, emulated=self.emulated)


def product(left: Array, right: Array, *, contract_right: int, emulated: bool, dtype: DTypeLike = jnp.float32) -> Array:
    """Return [M, N] in `dtype`. Three TF32 products replace one of float32, which misses tensor cores and spills."""
    precision: lax.Precision | lax.DotAlgorithmPreset | None = None
    if left.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST if emulated else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    dims = (((1,), (contract_right,)), ((), ()))
    return lax.dot_general(left, right, dims, precision=precision, preferred_element_type=dtype)


class Softmax(NamedTuple):
    """Online softmax of the tile's rows."""

    top: Array  # float32 [M], running maximum, as an exponent of two
    total: Array  # float32 [M]
    values: Array  # float32 [M, D], not yet divided by `total`


def start(rows: int, columns: int, sinks: Array | None) -> Softmax:
    """Return the softmax before the first block. A row's sink, a logit without a value, is counted from the start."""
    values = jnp.zeros((rows, columns), jnp.float32)
    if sinks is None:
        return Softmax(jnp.full((rows,), LOWEST, jnp.float32), jnp.zeros((rows,), jnp.float32), values)
    return Softmax(jnp.maximum(sinks.astype(jnp.float32) * LOG2E, LOWEST), jnp.ones((rows,), jnp.float32), values)


def padded(head_dim: int) -> int:
    """Return head_dim padded for Triton; 16 is the least that a dot accepts."""
    return max(16, int(pl.next_power_of_2(head_dim)))


def column_mask(head_dim: int) -> Array | None:
    columns = padded(head_dim)
    return None if columns == head_dim else jnp.arange(columns)[None, :] < head_dim


def and_masks(left: Array | None, right: Array | None) -> Array | None:
    if left is None or right is None:
        return left if right is None else right
    return left & right


def load(ref: jax.Ref, at: tuple[Any, ...], mask: Array | None, shape: tuple[int, ...] | None = None) -> Array:
    """Load ref[at], zeros outside of the mask, which broadcasts to `shape`."""
    if mask is None:
        return plgpu.load(ref.at[at])
    # Triton casts `other` to the array's type, but not an integer to a one-byte float.
    other = 0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0
    return plgpu.load(ref.at[at], mask=mask if shape is None else jnp.broadcast_to(mask, shape), other=other)


def load_rows(ref: jax.Ref, rows: tuple[Any, ...], mask: Array | None) -> Array:
    """Load ref[(*rows, :)] as [len, D padded]; rows outside `mask` and columns past head_dim are zero.

    Indices past the array are computed but not read. Clamping them instead would hide from Triton that neighbours are
    contiguous, and every load would become one of single elements.
    """
    head_dim = ref.shape[-1]
    columns = jnp.arange(padded(head_dim))[None, :]
    length = next(row.shape[0] for row in rows if row.ndim)
    index = (row[:, None] if row.ndim else row for row in rows)
    where = and_masks(None if mask is None else mask[:, None], column_mask(head_dim))
    return load(ref, (*index, columns), where, (length, padded(head_dim)))


class PagedKV(NamedTuple):
    """One layer's pages and the page table: Array outside a kernel, jax.Ref inside."""

    pages: Any  # [P, 2, K, S, D]
    scales: Any  # float32 [P, 2, K, S], or None
    table: Any  # int32 [N, W]


class KeyPlaces(NamedTuple):
    """The places of a block of keys."""

    pages: Array  # int32 [B]
    slots: Array  # int32 [B], within the pages
    readable: Array | None  # bool [B]; None: all of them are keys of the sequence


def page_ids(paged: PagedKV, sequence: Array, positions: Array, readable: Array | None) -> Array:
    """Return the pages of the keys at `positions` [B]; 0 where they must not be read."""
    entry = sequence, lax.div(positions, jnp.int32(paged.pages.shape[-2]))
    return load(paged.table, entry, readable)


def slots_of(paged: PagedKV, positions: Array) -> Array:
    """Return the slots of the keys at `positions` in their pages."""
    page_size = jnp.int32(paged.pages.shape[-2])
    return positions - lax.div(positions, page_size) * page_size


def attend(
    paged: PagedKV,
    q: Array,  # [M, D]
    state: Softmax,
    scoring: LogitScaling,
    keys: KeyPlaces,
    *,
    head: Array,
    visible: Array | None,  # bool [M, B] or [1, B], None: every row sees every key
) -> Softmax:
    """Add one block of keys to the softmax."""
    pages, slots, readable = keys

    k = load_rows(paged.pages, (pages, K, head, slots), readable).astype(q.dtype)
    raw = scoring.dot(q, k, contract_right=1)
    if paged.scales is not None:
        raw = raw * load(paged.scales, (pages, K, head, slots), readable)[None, :]
    scores = scoring.score(raw)
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.maximum(state.top, jnp.max(scores, axis=1) * scoring.exponent)
    weights = jnp.exp2(scores * scoring.exponent - top[:, None])
    shrink = jnp.exp2(state.top - top)
    total = state.total * shrink + jnp.sum(weights, axis=1)
    if paged.scales is not None:
        weights = weights * load(paged.scales, (pages, V, head, slots), readable)[None, :]
    v = load_rows(paged.pages, (pages, V, head, slots), readable).astype(q.dtype)
    values = state.values * shrink[:, None] + scoring.dot(weights.astype(q.dtype), v, contract_right=0)
    return Softmax(top, total, values)


def normalised(state: Softmax) -> Array:
    """Return the values float32 [M, D] divided by the total; rows without keys are zero."""
    return state.values / jnp.where(state.total == 0.0, 1.0, state.total)[:, None]
