"""GPU write of a step's keys and values into their pages: one program per token, in place, quantising narrow pages."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rekindle_kernels.ops.registry import Implementation
from rekindle_kernels.ops.write_kv import WriteCall
from rekindle_kernels.pages import LayerKV, as_stored, as_values
from rekindle_kernels.pallas.gpu.block import padded


def _round(values: jax.Array) -> jax.Array:
    """Round to the nearest integer, ties to even, by floor: Triton can't lower `round`, and XLA folds (x + c) - c."""
    below = jnp.floor(values)
    rest = values - below
    odd = below != 2.0 * jnp.floor(below * 0.5)
    return jnp.where((rest > 0.5) | ((rest == 0.5) & odd), below + 1.0, below)


def _narrow(values: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
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


def write_kv(
    kv: LayerKV, k: jax.Array, v: jax.Array, page_ids: jax.Array, offsets: jax.Array, *, interpret: bool = False
) -> LayerKV:
    """Compute `ops.write_kv.write_kv` as one kernel."""
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


def supports(call: WriteCall) -> str | None:
    """Return the reason why the kernel can't serve the call, or None."""
    return "keys alone are written" if call.latent else None


WRITE_KV = Implementation("pallas_gpu", write_kv, supports)
INTERPRETED = Implementation("pallas_gpu_interpret", functools.partial(write_kv, interpret=True), supports)
