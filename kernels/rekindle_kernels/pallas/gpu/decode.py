"""GPU decode: one query token per sequence, keys split over several programs (flash decoding), then merged.

Axes: R decode rows, H heads, K kv heads, G heads per kv head, D head_dim, Z splits. The heads of a group share one
tile, padded to the 16 rows that a dot needs. A program finds its share of the keys from the row's true length, so
neither the width of the page table nor the static number of splits costs anything beyond an early exit.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rekindle_kernels.ops.attention import AttentionInputs
from rekindle_kernels.pallas.gpu import block
from rekindle_kernels.tuning import GpuDecode


def _shares(
    length: jax.Array, sliding_window: int | None, config: GpuDecode, splits: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """First block, end block and blocks per split of a row with `length` keys."""
    first = jnp.int32(0)
    if sliding_window is not None:
        first = lax.div(jnp.maximum(length - sliding_window, 0), jnp.int32(config.block_k))
    end = lax.div(length + (config.block_k - 1), jnp.int32(config.block_k))
    share = lax.div(end - first + (splits - 1), jnp.int32(splits))
    return first, end, jnp.maximum(share, config.least_blocks)


def _decode_kernel(
    q_ref: jax.Ref,  # [T, H, D]
    paged: block.Paged,
    lens_ref: jax.Ref,  # int32 [N]
    sinks_ref: jax.Ref | None,  # [H]
    o_ref: jax.Ref,  # [T, H, D] with one split, else float32 [Z, R, H, D]
    top_ref: jax.Ref | None = None,  # float32 [Z, R, H]
    total_ref: jax.Ref | None = None,
    *,
    scoring: block.Scoring,
    config: GpuDecode,
    splits: int,
    group: int,
) -> None:
    row, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head_dim = q_ref.shape[-1]
    members = jnp.arange(max(16, int(pl.next_power_of_2(group))))
    real = members < group
    heads = head * group + members
    length = lens_ref[row]
    first, end, share = _shares(length, scoring.sliding_window, config, splits)
    begin = first + split * share
    end = jnp.minimum(end, begin + share)

    def step(index: jax.Array, state: block.Softmax) -> block.Softmax:
        positions = index * config.block_k + jnp.arange(config.block_k)
        readable = positions < length
        if scoring.sliding_window is not None:
            readable &= positions >= length - scoring.sliding_window
        return block.attend(
            paged, q, state, scoring,
            sequence=row, head=head, positions=positions, readable=readable, visible=readable[None, :],
        )  # fmt: skip

    q = block.load_rows(q_ref, (row, heads), real)
    sinks = None
    if sinks_ref is not None:
        # Every split may start from the sink's exponent; only the first one counts it.
        sinks = plgpu.load(sinks_ref.at[heads], mask=real, other=0.0)
    state = block.start(members.shape[0], block.padded(head_dim), sinks)
    if sinks is not None:
        state = state._replace(total=jnp.where(split == 0, state.total, 0.0))
    state = lax.fori_loop(begin, end, step, state)
    columns = jnp.arange(block.padded(head_dim))[None, :]
    mask = real[:, None] & (columns < head_dim)
    if top_ref is None or total_ref is None:
        out = block.normalised(state).astype(o_ref.dtype)
        plgpu.store(o_ref.at[row, heads[:, None], columns], out, mask=mask)
        return

    # The merge reads only the splits that had keys, so the others need not even write.
    @pl.when(begin < end)
    def _write() -> None:
        plgpu.store(o_ref.at[split, row, heads[:, None], columns], state.values, mask=mask)
        plgpu.store(top_ref.at[split, row, heads], state.top, mask=real)
        plgpu.store(total_ref.at[split, row, heads], state.total, mask=real)


def _merge_kernel(
    parts_ref: jax.Ref,  # float32 [Z, R, H, D]
    top_ref: jax.Ref,  # float32 [Z, R, H]
    total_ref: jax.Ref,
    lens_ref: jax.Ref,
    o_ref: jax.Ref,  # [T, H, D]
    *,
    scoring: block.Scoring,
    config: GpuDecode,
    splits: int,
) -> None:
    row, head = pl.program_id(0), pl.program_id(1)
    head_dim = o_ref.shape[-1]
    first, end, share = _shares(lens_ref[row], scoring.sliding_window, config, splits)
    index = jnp.arange(int(pl.next_power_of_2(splits)))
    used = index * share < end - first
    tops = plgpu.load(top_ref.at[index, row, head], mask=used, other=block.LOWEST)
    totals = plgpu.load(total_ref.at[index, row, head], mask=used, other=0.0)
    parts = block.load_rows(parts_ref, (index, row, head), used)
    top = jnp.max(tops, axis=0)
    shrink = jnp.exp2(tops - top)
    total = jnp.sum(totals * shrink, axis=0)
    values = jnp.sum(parts * shrink[:, None], axis=0)
    out = values / jnp.where(total == 0.0, 1.0, total)
    columns = jnp.arange(block.padded(head_dim))
    plgpu.store(o_ref.at[row, head, columns], out.astype(o_ref.dtype), mask=columns < head_dim)


def decode(
    inputs: AttentionInputs,
    paged: block.Paged,  # arrays here, references inside the kernel
    *,
    decode_rows: int,
    scoring: block.Scoring,
    config: GpuDecode,
    splits: int,
    interpret: bool = False,
) -> jax.Array:
    """Attention of the decode rows: [T, H, D], where only rows 0..R-1 are written."""
    q, kv_lens = inputs.q, inputs.kv_lens
    _, heads, head_dim = q.shape
    kv_heads = paged.pages.shape[2]
    parameters = plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    part = jax.ShapeDtypeStruct((splits, decode_rows, heads), jnp.float32)
    outs: tuple[jax.ShapeDtypeStruct, ...] = (out,)
    if splits > 1:
        outs = (jax.ShapeDtypeStruct((*part.shape, head_dim), jnp.float32), part, part)
    results = pl.pallas_call(
        functools.partial(_decode_kernel, scoring=scoring, config=config, splits=splits, group=heads // kv_heads),
        grid=(decode_rows, kv_heads, splits),
        out_shape=outs,
        compiler_params=parameters,
        interpret=interpret,
        name="paged_decode",
    )(q, paged, kv_lens, inputs.sinks)
    if splits == 1:
        return results[0]
    return pl.pallas_call(
        functools.partial(_merge_kernel, scoring=scoring, config=config, splits=splits),
        grid=(decode_rows, heads),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_decode_merge",
    )(*results, kv_lens)
