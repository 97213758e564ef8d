"""GPU attention over pages read in place: decode and chunked prefill, both Triton-backed Pallas kernels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rekindle_kernels import gpus, tuning
from rekindle_kernels.ops.attention import AttentionCall, AttentionInputs, AttentionOptions, WriteCall
from rekindle_kernels.ops.registry import Implementation
from rekindle_kernels.pages import LayerKV, as_stored, as_values
from rekindle_kernels.pallas import tiles
from rekindle_kernels.pallas.gpu import block
from rekindle_kernels.pallas.gpu.block import LogitScaling, PagedKV, padded
from rekindle_kernels.pallas.gpu.decode import decode
from rekindle_kernels.tuning import GpuPrefill

QUERY_TYPES = ("bfloat16", "float16", "float32")
PAGE_TYPES = (*QUERY_TYPES, "int8", "float8_e4m3fn", "float8_e5m2")


def supports(call: AttentionCall) -> str | None:
    """Return the reason why these kernels can't serve the call, or None."""
    if call.q_dtype.name not in QUERY_TYPES:
        return f"queries are {call.q_dtype.name}, not one of {', '.join(QUERY_TYPES)}"
    if call.kv_dtype.name not in PAGE_TYPES:
        return f"pages are {call.kv_dtype.name}, not one of {', '.join(PAGE_TYPES)}"
    if not call.causal:
        return "queries see the keys after them"
    if call.value_size is not None:
        return "values are a part of the keys"
    if call.head_dim > 256:
        return f"head_dim {call.head_dim} is more than 256, whose tiles overflow the registers"
    return gpus.without_triton() or (gpus.without_float8() if call.kv_dtype.name == "float8_e4m3fn" else None)


def attention(
    inputs: AttentionInputs,
    options: AttentionOptions,
    *,
    decode_config: tuning.GpuDecode | None = None,
    prefill_config: tuning.GpuPrefill | None = None,
    extra: int | None = None,
    interpret: bool = False,
) -> Array:
    """Compute `ops.attention.paged_attention`. Block sizes and `extra` items of work default to those in `tuning`."""
    q, kv, rows = inputs.q, inputs.kv, options.decode_rows
    tokens, heads, head_dim = q.shape
    paged, scoring = paged_and_scoring(inputs, options, interpret=interpret)
    out = None
    if rows:
        out = decode_rows(inputs, paged, scoring, rows, config=decode_config, extra=extra, interpret=interpret)
    if tokens > rows:
        pairs = (tokens - rows) * (heads // kv.kv_heads)
        tile = prefill_config or tuning.gpu_prefill(q.dtype, kv.dtype, head_dim, kv.page_size, pairs)
        with jax.named_scope("prefill"):
            out = prefill(inputs, paged, out, decode_rows=rows, scoring=scoring, config=tile, interpret=interpret)
    return jnp.zeros_like(q) if out is None else out


def paged_and_scoring(
    inputs: AttentionInputs, options: AttentionOptions, *, interpret: bool
) -> tuple[PagedKV, LogitScaling]:
    """Return the pages and the scoring in the kernels' form."""
    pages = as_values(inputs.kv.pages, inputs.kv)
    if 2**31 < pages.nbytes <= 2**32 and pages.dtype.itemsize == 1:
        # Pallas counts elements in 32 signed bits up to 4 GiB.
        raise ValueError(
            f"{pages.nbytes / 2**30:.1f} GiB of one-byte pages in one layer; make it at most 2 GiB or over 4"
        )
    scoring = LogitScaling(float(options.scale), options.soft_cap, options.sliding_window, emulated=interpret)
    return PagedKV(pages, inputs.kv.scales, inputs.page_table), scoring


def decode_rows(
    inputs: AttentionInputs,
    paged: PagedKV,
    scoring: LogitScaling,
    rows: int,
    *,
    config: tuning.GpuDecode | None = None,
    extra: int | None = None,
    interpret: bool = False,
) -> Array:
    """Compute attention of the decode rows: [T, H, D], where only rows 0..R-1 are written."""
    kv = inputs.kv
    config = config or tuning.gpu_decode(kv.dtype, inputs.q.shape[-1], kv.page_size)
    longest = min(inputs.page_table.shape[1] * kv.page_size, scoring.sliding_window or 2**31)
    if extra is None:
        extra = tuning.gpu_extra_items(config, rows, kv.kv_heads, longest)
    with jax.named_scope("decode"):
        return decode(inputs, paged, decode_rows=rows, scoring=scoring, config=config, extra=extra, interpret=interpret)


ATTENTION = Implementation("pallas_gpu", attention, supports)
# The same kernels as plain JAX operations, on any device: slow, for tests.
INTERPRETED = Implementation("pallas_gpu_interpret", functools.partial(attention, interpret=True), supports)


# GPU chunked prefill: many query tokens per sequence against its paged keys, ragged over sequences.
#
# Axes: T tokens, H heads, K kv heads, G heads per kv head, D head_dim, M rows of a tile. A row is one (token, head of
# the group) pair, so a tile is full for every G, and the keys are read once for the whole group.


def _prefill_kernel(
    q_ref: jax.Ref,  # [T, H, D]
    paged: block.PagedKV,
    table_ref: jax.Ref,  # int32 [5, tiles]
    sinks_ref: jax.Ref | None,  # [H]
    *refs: jax.Ref,
    scoring: block.LogitScaling,
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

    def step(index: Array, state: block.Softmax, *, masked: bool) -> block.Softmax:
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
    paged: block.PagedKV,  # arrays here, references inside the kernel
    out: Array | None,  # [T, H, D] with the decode rows done; written in place
    *,
    decode_rows: int,
    scoring: block.LogitScaling,
    config: GpuPrefill,
    interpret: bool = False,
) -> Array:
    """Compute attention of the prefill tokens: [T, H, D], with the first R tokens taken from `out`."""
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


# GPU write of a step's keys and values into their pages: one program per token, in place, quantising narrow pages.


def _round(values: Array) -> Array:
    """Round to the nearest integer, ties to even, by floor: Triton can't lower `round`, and XLA folds (x + c) - c."""
    below = jnp.floor(values)
    rest = values - below
    odd = below != 2.0 * jnp.floor(below * 0.5)
    return jnp.where((rest > 0.5) | ((rest == 0.5) & odd), below + 1.0, below)


def _narrow(values: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Compute `pages.quantize` with Triton's operations: float32 [K, D] to (dtype [K, D], float32 [K])."""
    integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if integer else jnp.finfo(dtype).max)
    scales = jnp.max(jnp.abs(values), axis=1) / largest
    steps = values / jnp.where(scales == 0.0, 1.0, scales)[:, None]
    return (_round(steps) if integer else steps).astype(dtype), scales


def _write_kernel(
    k_ref: jax.Ref,  # [T, K, D]
    v_ref: jax.Ref,
    page_ids_ref: jax.Ref,  # int32 [T]
    offsets_ref: jax.Ref,  # int32 [T]
    *refs: jax.Ref,  # pages and perhaps scales, first as inputs, then as the outputs that alias them
) -> None:
    outs = refs[len(refs) // 2 :]
    token = pl.program_id(0)
    kv_heads, head_dim = k_ref.shape[1:]
    page, offset = page_ids_ref[token], offsets_ref[token]
    heads = jnp.arange(int(pl.next_power_of_2(kv_heads)))
    columns = jnp.arange(padded(head_dim))[None, :]
    mask = (heads[:, None] < kv_heads) & (columns < head_dim)
    for half, ref in enumerate((k_ref, v_ref)):
        values = plgpu.load(ref.at[token, heads[:, None], columns], mask=mask, other=0.0)
        if len(outs) == 2:
            values, scales = _narrow(values.astype(jnp.float32), outs[0].dtype)
            plgpu.store(outs[1].at[page, half, heads, offset], scales, mask=heads < kv_heads)
        target = outs[0].at[page, half, heads[:, None], offset, columns]
        plgpu.store(target, values.astype(outs[0].dtype), mask=mask)


def write_kv(kv: LayerKV, k: Array, v: Array, page_ids: Array, offsets: Array, *, interpret: bool = False) -> LayerKV:
    """Compute `ops.attention.write_kv` as one kernel."""
    pages = as_values(kv.pages, kv)
    leaves = (pages,) if kv.scales is None else (pages, kv.scales)
    out = pl.pallas_call(
        _write_kernel,
        grid=(k.shape[0],),
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves],
        input_output_aliases={4 + index: index for index in range(len(leaves))},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="write_kv",
    )(k, v, page_ids, offsets, *leaves)
    return LayerKV(as_stored(out[0], kv), out[1] if len(out) == 2 else None)


def supports_write(call: WriteCall) -> str | None:
    """Return the reason why the kernel can't serve the call, or None."""
    if call.latent:
        return "keys alone are written"
    if call.kv_dtype.name not in PAGE_TYPES:
        return f"pages are {call.kv_dtype.name}, not one of {', '.join(PAGE_TYPES)}"
    return gpus.without_triton() or (gpus.without_float8() if call.kv_dtype.name == "float8_e4m3fn" else None)


WRITE_KV = Implementation("pallas_gpu", write_kv, supports_write)
WRITE_INTERPRETED = Implementation("pallas_gpu_interpret", functools.partial(write_kv, interpret=True), supports_write)
