"""GPU product of rows with the matrices of their experts: a program per tile of one expert's rows and of its outputs.

Axes: M rows, sorted by expert, G experts, I inputs, O outputs. Only the matrices of experts that have rows are read,
and each of them once for every tile of rows: in decode, where an expert has a few rows, once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rekindle_kernels import int4
from rekindle_kernels.ops.grouped import GroupedCall
from rekindle_kernels.ops.registry import Implementation
from rekindle_kernels.pallas.gpu import int4_grouped
from rekindle_kernels.pallas.gpu.block import and_masks, product
from rekindle_kernels.pallas.gpu.expert_tiles import END, FIRST, OWNER, tile_table

TYPES = ("bfloat16", "float16", "float32", "int8")


@dataclass(frozen=True, slots=True)
class Tile:
    """The sizes of a program's results and of its loads."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int = 3


def tile_for(x: jax.ShapeDtypeStruct, experts: int) -> Tile:
    """Return tiles of as many rows as an expert has on average, from 16 to 128; checked by compiling for an H100."""
    share = -(-x.shape[0] // experts)
    rows = max(16, min(128, 1 << (share - 1).bit_length()))
    if x.dtype.itemsize == 4:
        return Tile(min(rows, 64), 64, 32, num_warps=4)
    return Tile(rows, 128, 64, num_warps=8 if rows == 128 else 4)


def supports(call: GroupedCall) -> str | None:
    """Return the reason why the kernel can't serve the call, or None."""
    names = call.x.dtype.name, call.weight.dtype.name
    if call.scale is not None:
        if names[0] not in int4_grouped.TYPES:
            return f"rows are {names[0]}, not one of {', '.join(int4_grouped.TYPES)}"
        if names[1] not in int4_grouped.WORDS:
            return f"integers of {int4.BITS[names[1]]} bits are not widened in registers"
    elif names[0] not in TYPES or names[1] not in (names[0], "int8"):
        return f"rows are {names[0]} and matrices {names[1]}"
    shape = call.weight.shape if call.scale is None else int4.matrix_shape(call.weight)
    if max(call.weight.size, call.x.shape[0] * shape[1]) >= 2**31:
        return f"{call.weight.size} weights are more than 31 bits count"
    return None


def _kernel(
    x_ref: jax.Ref,  # [M, I]
    weight_ref: jax.Ref,  # [G, O, I]
    table_ref: jax.Ref,  # int32 [3, tiles]
    out_ref: jax.Ref,  # [M, O]
    *,
    tile: Tile,
    emulated: bool,
) -> None:
    number = pl.program_id(1)
    expert, first, end = table_ref[OWNER, number], table_ref[FIRST, number], table_ref[END, number]
    inputs, outputs = x_ref.shape[1], out_ref.shape[1]
    rows = first + jnp.arange(tile.rows)
    columns = pl.program_id(0) * tile.outputs + jnp.arange(tile.outputs)
    real = rows < end
    exists = None if outputs % tile.outputs == 0 else columns < outputs
    summed = jnp.int32 if x_ref.dtype == jnp.int8 else jnp.float32

    def load(ref: jax.Ref, at: tuple[jax.Array, ...], left: jax.Array | None, right: jax.Array | None) -> jax.Array:
        mask = and_masks(None if left is None else left[:, None], None if right is None else right[None, :])
        if mask is None:
            return plgpu.load(ref.at[at])
        mask = jnp.broadcast_to(mask, (at[-2].shape[0], tile.inputs))
        return plgpu.load(ref.at[at], mask=mask, other=0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0)

    def step(turn: jax.Array, total: jax.Array) -> jax.Array:
        at = turn * tile.inputs + jnp.arange(tile.inputs)
        inside = None if inputs % tile.inputs == 0 else at < inputs
        x = load(x_ref, (rows[:, None], at[None, :]), real, inside)
        weight = load(weight_ref, (expert, columns[:, None], at[None, :]), exists, inside).astype(x.dtype)
        return total + product(x, weight, contract_right=1, emulated=emulated, dtype=summed)

    @pl.when(first < end)
    def _compute() -> None:
        turns = -(-inputs // tile.inputs)
        total = lax.fori_loop(0, turns, step, jnp.zeros((tile.rows, tile.outputs), summed))
        mask = real[:, None] & (columns < outputs)[None, :]
        plgpu.store(out_ref.at[rows[:, None], columns[None, :]], total.astype(out_ref.dtype), mask=mask)


def grouped(
    x: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    scale: jax.Array | None,
    minimum: jax.Array | None,
    dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute `ops.grouped.grouped_linear` as one kernel."""
    if scale is not None:
        return int4_grouped.multiply(x, weight, scale, minimum, sizes, dtype, interpret=interpret)
    tile = tile_for(jax.ShapeDtypeStruct(x.shape, x.dtype), weight.shape[0])
    table = tile_table(sizes, x.shape[0], tile.rows)
    outputs = weight.shape[1]
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile, emulated=interpret),
        grid=(-(-outputs // tile.outputs), table.shape[1]),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], outputs), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="grouped_linear",
    )(x, weight, table)


GROUPED = Implementation("pallas_gpu", grouped, supports)
# The same kernel as plain JAX operations, on any device: slow, for tests.
INTERPRETED = Implementation("pallas_gpu_interpret", functools.partial(grouped, interpret=True), supports)
