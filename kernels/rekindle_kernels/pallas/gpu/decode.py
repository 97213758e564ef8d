"""GPU decode: one query token per sequence, keys divided among programs by the work table, then merged.

Axes: R decode rows, H heads, K kv heads, G heads per kv head, D head_dim, I items of work. The heads of a group share
one tile, padded to the 16 rows that a dot needs. The width of the page table and its empty rows cost nothing.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rekindle_kernels.ops.attention import AttentionInputs
from rekindle_kernels.pallas.gpu import block
from rekindle_kernels.tuning import GpuDecode

MERGED = 8  # parts read at once by the merge


def _decode_kernel(
    q_ref: jax.Ref,  # [T, H, D]
    paged: block.PagedKV,
    lens_ref: jax.Ref,  # int32 [N]
    items_ref: jax.Ref,  # int32 [4, I]
    sinks_ref: jax.Ref | None,  # [H]
    o_ref: jax.Ref,  # [T, H, D] with one item for each row, else float32 [I, H, D]
    top_ref: jax.Ref | None = None,  # float32 [I, H]
    total_ref: jax.Ref | None = None,
    *,
    scoring: block.LogitScaling,
    config: GpuDecode,
    group: int,
) -> None:
    item, head = pl.program_id(0), pl.program_id(1)
    row, begin, end = items_ref[ROW, item], items_ref[BEGIN, item], items_ref[END, item]
    head_dim = q_ref.shape[-1]
    members = jnp.arange(max(16, int(pl.next_power_of_2(group))))
    real = members < group
    heads = head * group + members
    length = lens_ref[row]

    def block_at(index: Array) -> tuple[Array, Array]:
        positions = index * config.block_k + jnp.arange(config.block_k)
        readable = positions < length
        if scoring.sliding_window is not None:
            readable &= positions >= length - scoring.sliding_window
        return positions, readable

    # Page ids are loaded one turn before their keys: keys whose address is loaded in the same turn have to wait for it,
    # and Triton then keeps only one buffer of them. (At most one block after `end` is looked up, and not read.)
    def step(index: Array, carried: tuple[block.Softmax, Array]) -> tuple[block.Softmax, Array]:
        state, pages = carried
        following = block.page_ids(paged, row, *block_at(index + 1))
        positions, readable = block_at(index)
        keys = block.KeyPlaces(pages, block.slots_of(paged, positions), readable)
        return block.attend(paged, q, state, scoring, keys, head=head, visible=readable[None, :]), following

    q = block.load_rows(q_ref, (row, heads), real)
    sinks = None
    if sinks_ref is not None:
        # Every item of a row may start from the sink's exponent; only the first one counts it.
        sinks = plgpu.load(sinks_ref.at[heads], mask=real, other=0.0)
    state = block.start(members.shape[0], block.padded(head_dim), sinks)
    if sinks is not None:
        state = state._replace(total=jnp.where(items_ref[LEADS, item] == 1, state.total, 0.0))
    state, _ = lax.fori_loop(begin, end, step, (state, block.page_ids(paged, row, *block_at(begin))))
    columns = jnp.arange(block.padded(head_dim))[None, :]
    mask = real[:, None] & (columns < head_dim)
    if top_ref is None or total_ref is None:
        out = block.normalised(state).astype(o_ref.dtype)
        plgpu.store(o_ref.at[row, heads[:, None], columns], out, mask=mask)
        return
    plgpu.store(o_ref.at[item, heads[:, None], columns], state.values, mask=mask)
    plgpu.store(top_ref.at[item, heads], state.top, mask=real)
    plgpu.store(total_ref.at[item, heads], state.total, mask=real)


def _merge_kernel(
    parts_ref: jax.Ref,  # float32 [I, H, D]
    top_ref: jax.Ref,  # float32 [I, H]
    total_ref: jax.Ref,
    starts_ref: jax.Ref,  # int32 [R + 1]
    o_ref: jax.Ref,  # [T, H, D]
) -> None:
    row, head = pl.program_id(0), pl.program_id(1)
    begin, end = starts_ref[row], starts_ref[row + 1]
    head_dim = o_ref.shape[-1]

    def step(turn: Array, state: block.Softmax) -> block.Softmax:
        items = begin + turn * MERGED + jnp.arange(MERGED)
        used = items < end
        tops = plgpu.load(top_ref.at[items, head], mask=used, other=block.LOWEST)
        totals = plgpu.load(total_ref.at[items, head], mask=used, other=0.0)
        parts = block.load_rows(parts_ref, (items, head), used)
        top = jnp.maximum(state.top, jnp.max(tops, axis=0))
        shrink, shrink_state = jnp.exp2(tops - top), jnp.exp2(state.top - top)
        total = state.total * shrink_state + jnp.sum(totals * shrink, axis=0)
        return block.Softmax(top, total, state.values * shrink_state + jnp.sum(parts * shrink[:, None], axis=0))

    empty = jnp.zeros((block.padded(head_dim),), jnp.float32)
    state = block.Softmax(jnp.float32(block.LOWEST), jnp.float32(0), empty)
    state = lax.fori_loop(0, lax.div(end - begin + (MERGED - 1), jnp.int32(MERGED)), step, state)
    out = state.values / jnp.where(state.total == 0.0, 1.0, state.total)
    columns = jnp.arange(block.padded(head_dim))
    plgpu.store(o_ref.at[row, head, columns], out.astype(o_ref.dtype), mask=columns < head_dim)


def decode(
    inputs: AttentionInputs,
    paged: block.PagedKV,  # arrays here, references inside the kernel
    *,
    decode_rows: int,
    scoring: block.LogitScaling,
    config: GpuDecode,
    extra: int,
    interpret: bool = False,
) -> Array:
    """Compute attention of the decode rows: [T, H, D], where only rows 0..R-1 are written."""
    q, kv_lens = inputs.q, inputs.kv_lens
    _, heads, head_dim = q.shape
    kv_heads = paged.pages.shape[2]
    table = work_table(kv_lens[:decode_rows], sliding_window=scoring.sliding_window, config=config, extra=extra)
    parameters = plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    items = decode_rows + extra
    part = jax.ShapeDtypeStruct((items, heads), jnp.float32)
    outs: tuple[jax.ShapeDtypeStruct, ...] = (out,)
    if extra:
        outs = (jax.ShapeDtypeStruct((*part.shape, head_dim), jnp.float32), part, part)
    results = pl.pallas_call(
        functools.partial(_decode_kernel, scoring=scoring, config=config, group=heads // kv_heads),
        grid=(items, kv_heads),
        out_shape=outs,
        compiler_params=parameters,
        interpret=interpret,
        name="paged_decode",
    )(q, paged, kv_lens, table.items, inputs.sinks)
    if not extra:
        return results[0]
    return pl.pallas_call(
        _merge_kernel,
        grid=(decode_rows, heads),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_decode_merge",
    )(*results, table.starts)


# The work table: the keys and the row of each program, built on the device for every step. Rows differ in length:
# with a fixed number of programs for each of them, one row of 32,768 keys among 63 short ones would run on a few
# multiprocessors while the others are idle. So every row has one item, and the `extra` ones go to the rows with the
# most keys: all items have about as much work, at most.
#
# Rows of `WorkTable.items`.
ROW = 0
BEGIN = 1  # first block of keys
END = 2  # block after the last one
LEADS = 3  # 1 for the row's first item


class WorkTable(NamedTuple):
    """The items of all rows, row after row."""

    items: Array  # int32 [4, I]; unused items have no keys
    starts: Array  # int32 [R + 1]: items starts[r] to starts[r + 1] are those of row r


def work_table(
    lengths: Array,  # int32 [R]
    *,
    sliding_window: int | None,
    config: GpuDecode,
    extra: int,
) -> WorkTable:
    """Divide the blocks of keys of all rows among R + extra items."""
    rows, size = lengths.shape[0], config.block_k
    first = jnp.zeros_like(lengths)
    if sliding_window is not None:
        first = jnp.maximum(lengths - sliding_window, 0) // size
    end = (lengths + size - 1) // size
    blocks = end - first
    counts = jnp.ones_like(lengths)
    if extra:
        # Rounding up gives each row less than one item more than its part of `extra`, so there are always enough.
        most = jnp.maximum((jnp.sum(blocks) + extra - 1) // extra, config.least_blocks)
        counts = jnp.maximum((blocks + most - 1) // most, 1)
    share = (blocks + counts - 1) // counts
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    item = jnp.arange(rows + extra, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(item[:, None] >= starts[None, 1:], axis=1), rows - 1)
    part = item - starts[row]
    begin = first[row] + part * share[row]
    items = [row, begin, jnp.minimum(end[row], begin + share[row]), part == 0]
    return WorkTable(jnp.stack([column.astype(jnp.int32) for column in items]), starts)
