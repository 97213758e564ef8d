"""GPU chunked prefill: many query tokens per sequence against its paged keys, ragged over sequences.

Axes: T tokens, H heads, K kv heads, G heads per kv head, D head_dim, M rows of a tile. A row is one (token, head of the
group) pair, so a tile is full for every G, and the keys are read once for the whole group.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rekindle_kernels.ops.attention import AttentionInputs
from rekindle_kernels.pallas import tiles
from rekindle_kernels.pallas.gpu import block
from rekindle_kernels.tuning import GpuPrefill


def _prefill_kernel(
    q_ref: jax.Ref,  # [T, H, D]
    paged: block.Paged,
    table_ref: jax.Ref,  # int32 [5, tiles]
    sinks_ref: jax.Ref | None,  # [H]
    *refs: jax.Ref,
    scoring: block.Scoring,
    config: GpuPrefill,
    group: int,
) -> None:
    o_ref = refs[-1]  # [T, H, D]; with decode rows before it the aliased input comes first
    tile, head = pl.program_id(0), pl.program_id(1)
    head_dim = q_ref.shape[-1]
    sequence = table_ref[tiles.SEQUENCE, tile]
    query = table_ref[tiles.QUERY, tile]
    queries = table_ref[tiles.QUERIES, tile]
    context = table_ref[tiles.CONTEXT, tile]
    first = table_ref[tiles.FIRST, tile]

    rows = first + jnp.arange(config.block_m)
    token = lax.div(rows, jnp.int32(group))
    heads = head * group + (rows - token * group)
    real = token < queries
    positions = context - queries + token

    # Blocks [low, high) hold a key that some row sees; [clear, shut) hold only keys that every row sees.
    size = jnp.int32(config.block_k)
    nearest = context - queries + lax.div(first, jnp.int32(group))
    farthest = jnp.minimum(nearest + (config.block_m - 1) // group + 1, context - 1)
    empty = (first >= queries * group) | (context <= 0)
    high = jnp.where(empty, 0, lax.div(farthest + size, size))
    low = clear = jnp.int32(0)
    if scoring.sliding_window is not None:
        low = jnp.minimum(lax.div(jnp.maximum(nearest - scoring.sliding_window + 1, 0), size), high)
        clear = lax.div(jnp.maximum(farthest - scoring.sliding_window + size, 0), size)
        clear = jnp.minimum(jnp.maximum(clear, low), high)
    shut = jnp.maximum(jnp.minimum(lax.div(nearest + 1, size), high), clear)

    def step(index: jax.Array, state: block.Softmax, *, masked: bool) -> block.Softmax:
        columns = index * config.block_k + jnp.arange(config.block_k)
        readable = visible = None
        if masked:
            readable = columns < context
            visible = columns[None, :] <= positions[:, None]
            if scoring.sliding_window is not None:
                readable &= columns > nearest - scoring.sliding_window
                visible &= columns[None, :] > positions[:, None] - scoring.sliding_window
        pages = block.page_ids(paged, sequence, columns, readable)
        keys = block.KeyPlaces(pages, block.slots_of(paged, columns), readable)
        return block.attend(paged, q, state, scoring, keys, head=head, visible=visible)

    q = block.load_rows(q_ref, (query + token, heads), real)
    state = block.start(config.block_m, block.padded(head_dim), None if sinks_ref is None else sinks_ref[heads])
    if scoring.sliding_window is not None:
        state = lax.fori_loop(low, clear, functools.partial(step, masked=True), state)
    state = lax.fori_loop(clear, shut, functools.partial(step, masked=False), state)
    state = lax.fori_loop(shut, high, functools.partial(step, masked=True), state)
    out = block.normalised(state).astype(o_ref.dtype)
    columns = jnp.arange(block.padded(head_dim))[None, :]
    mask = real[:, None] & (columns < head_dim)
    plgpu.store(o_ref.at[(query + token)[:, None], heads[:, None], columns], out, mask=mask)


def prefill(
    inputs: AttentionInputs,
    paged: block.Paged,  # arrays here, references inside the kernel
    out: jax.Array | None,  # [T, H, D] with the decode rows done; written in place
    *,
    decode_rows: int,
    scoring: block.Scoring,
    config: GpuPrefill,
    interpret: bool = False,
) -> jax.Array:
    """Compute attention of the prefill tokens: [T, H, D], where tokens before R are those of `out`."""
    q = inputs.q
    kv_heads = paged.pages.shape[2]
    group = q.shape[1] // kv_heads
    table = tiles.tile_table(inputs, decode_rows=decode_rows, rows_per_token=group, block=config.block_m)
    arguments: tuple[Any, ...] = (q, paged, table, inputs.sinks)
    aliases = {}
    if out is not None:
        aliases = {len(jax.tree.leaves(arguments)): 0}
        arguments = (*arguments, out)
    return pl.pallas_call(
        functools.partial(_prefill_kernel, scoring=scoring, config=config, group=group),
        grid=(table.shape[1], kv_heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_prefill",
    )(*arguments)
