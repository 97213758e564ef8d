"""Bounds of pages, and the choice among them, in operations of XLA: the fallback on every platform."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from rekindle_kernels.ops.registry import Implementation, anything
from rekindle_kernels.pages import LayerKV, as_values

FARTHEST = -80.0  # below the largest, where e^x counts as this much: implementations round smaller numbers differently
NEVER = -1e30
AT_ONCE = 16 << 20  # bytes of bounds in float32


def bound(kv: LayerKV, page_ids: Array, offsets: Array, most: int) -> LayerKV:
    """Implement `ops.page_bounds.bound_pages`."""
    assert kv.bounds is not None, "the pages have bounds"
    (filling,) = jnp.nonzero(offsets == kv.page_size - 1, size=most, fill_value=-1)
    ids = jnp.where(filling < 0, 0, page_ids[filling])  # the scratch page
    array, place = kv.part(0)
    keys = as_values(array.at[ids, place].get(mode="promise_in_bounds"), kv).astype(jnp.float32)  # [n, K, S, D]
    if kv.scales is not None:
        keys = keys * kv.scales.at[ids, 0].get(mode="promise_in_bounds")[..., None]
    bounds = jnp.stack([jnp.min(keys, axis=2), jnp.max(keys, axis=2)], axis=1).astype(jnp.bfloat16)
    stored = bounds if kv.bounds.dtype == jnp.bfloat16 else lax.bitcast_convert_type(bounds, kv.bounds.dtype)
    return kv._replace(bounds=kv.bounds.at[ids].set(stored, mode="promise_in_bounds"))


class ChosenPages(NamedTuple):
    """The pages that decode rows attend to."""

    table: Array  # int32 [R, K, B]
    lens: Array  # int32 [R], keys on them


def choose(q: Array, kv: LayerKV, table: Array, lens: Array, most: int, scale: float) -> ChosenPages:
    """Return `most` pages of each row and kv head, in their order, for queries q [R, H, D] as `kv` stores vectors."""
    R, H, D = q.shape
    K, S, W = kv.kv_heads, kv.page_size, table.shape[1]
    q = (q.astype(jnp.float32) * scale).reshape(R, K, H // K, D)
    at, count = jnp.arange(W), -(-lens // S)
    before = at < (count - 1)[:, None, None, None]
    logits = jnp.where(before, _logits(q, kv, table), NEVER)
    weights = jnp.exp(jnp.maximum(logits - jnp.max(logits, axis=-1, keepdims=True), FARTHEST))
    weights = jnp.where(before, weights, 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    shares = jnp.sum(weights / jnp.where(total == 0, 1, total), axis=2)  # [R, K, W]
    own = at == (count - 1)[:, None, None]
    shares = jnp.where(own, jnp.inf, jnp.where(before[:, :, 0], shares, -1))
    chosen = jnp.sort(lax.top_k(shares, most)[1], axis=-1)
    pages = jnp.take_along_axis(jnp.broadcast_to(table[:, None], (R, K, W)), chosen, axis=2)
    return ChosenPages(pages, keys_on(lens, most, S))


def _logits(q: Array, kv: LayerKV, table: Array) -> Array:
    """Return the bounds of the products of queries q [R, K, G, D] with the keys of pages: [R, K, G, W].

    So many pages at a time are read that their bounds in float32 take at most AT_ONCE bytes.
    """
    R, K, G, D = q.shape
    W, size = table.shape[1], max(1, AT_ONCE // (4 * R * 2 * K * D))
    if size >= W:
        return _logits_of(q, kv, table)
    blocks = -(-W // size)
    columns = jnp.pad(table, ((0, 0), (0, blocks * size - W))).reshape(R, blocks, size).swapaxes(0, 1)
    logits = lax.map(lambda block: _logits_of(q, kv, block), columns)  # [blocks, R, K, G, size]
    return jnp.moveaxis(logits, 0, 3).reshape(R, K, G, blocks * size)[..., :W]


def _logits_of(q: Array, kv: LayerKV, table: Array) -> Array:
    assert kv.bounds is not None, "the pages have bounds"
    bounds = kv.bounds.at[table].get(mode="promise_in_bounds")  # [R, W, 2, K, D]
    bounds = bounds if bounds.dtype == jnp.bfloat16 else lax.bitcast_convert_type(bounds, jnp.bfloat16)
    bounds = bounds.astype(jnp.float32)
    low = jnp.einsum("rkgd,rwkd->rkgw", jnp.minimum(q, 0), bounds[:, :, 0], precision="highest")
    high = jnp.einsum("rkgd,rwkd->rkgw", jnp.maximum(q, 0), bounds[:, :, 1], precision="highest")
    return low + high


def keys_on(lens: Array, most: int, page_size: int) -> Array:
    """Return how many keys rows of `lens` keys have on `most` pages, the last one among them."""
    return jnp.where(lens <= most * page_size, lens, (most - 1) * page_size + (lens - 1) % page_size + 1)


BOUND_PAGES = Implementation("xla", bound, anything)
