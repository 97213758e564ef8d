"""GPU product of rows with the matrices of their experts: a program per tile of one expert's rows and of its outputs.

Axes: M rows, sorted by expert, G experts, I inputs, O outputs. Only the matrices of experts that have rows are read,
and each of them once for every tile of rows: in decode, where an expert has a few rows, once. Matrices of four or eight
bits in groups are read in their stored form, as in `int4.py`: XLA would first widen those of all experts in memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rekindle_kernels import gpus, int4
from rekindle_kernels.ops.linear import GroupedCall
from rekindle_kernels.ops.registry import Implementation
from rekindle_kernels.pallas.gpu.block import and_masks, load, product
from rekindle_kernels.pallas.gpu.int4 import TYPES as PACKED_TYPES
from rekindle_kernels.pallas.gpu.int4 import WORDS, Int4Tile, as_words, inputs_in_word, lay_out, summed

TYPES = ("bfloat16", "float16", "float32", "int8")


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """The sizes of a program's results and of its loads."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int = 3


def tile_for(x: jax.ShapeDtypeStruct, experts: int) -> ExpertTile:
    """Return tiles of as many rows as an expert has on average, from 16 to 128; checked by compiling for an H100."""
    share = -(-x.shape[0] // experts)
    rows = max(16, min(128, 1 << (share - 1).bit_length()))
    if x.dtype.itemsize == 4:
        return ExpertTile(min(rows, 64), 64, 32, num_warps=4)
    return ExpertTile(rows, 128, 64, num_warps=8 if rows == 128 else 4)


def supports(call: GroupedCall) -> str | None:
    """Return the reason why the kernel can't serve the call, or None."""
    names = call.x.dtype.name, call.weight.dtype.name
    if call.scale is not None:
        if names[0] not in PACKED_TYPES:
            return f"rows are {names[0]}, not one of {', '.join(PACKED_TYPES)}"
        if names[1] not in WORDS:
            return f"{names[1]} is not widened in registers"
    elif names[0] not in TYPES or names[1] not in (names[0], "int8"):
        return f"rows are {names[0]} and matrices {names[1]}"
    shape = call.weight.shape if call.scale is None else int4.matrix_shape(call.weight)
    if max(call.weight.size, call.x.shape[0] * shape[1]) >= 2**31:
        return f"{call.weight.size} weights are more than 31 bits count"
    return gpus.without_triton()


def _kernel(
    x_ref: jax.Ref,  # [M, I]
    weight_ref: jax.Ref,  # [G, O, I]
    table_ref: jax.Ref,  # int32 [3, tiles]
    out_ref: jax.Ref,  # [M, O]
    *,
    tile: ExpertTile,
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

    def part(ref: jax.Ref, at: tuple[Array, ...], left: Array | None, right: Array | None) -> Array:
        mask = and_masks(None if left is None else left[:, None], None if right is None else right[None, :])
        return load(ref, at, mask, (at[-2].shape[0], tile.inputs))

    def step(turn: Array, total: Array) -> Array:
        at = turn * tile.inputs + jnp.arange(tile.inputs)
        inside = None if inputs % tile.inputs == 0 else at < inputs
        x = part(x_ref, (rows[:, None], at[None, :]), real, inside)
        weight = part(weight_ref, (expert, columns[:, None], at[None, :]), exists, inside).astype(x.dtype)
        return total + product(x, weight, contract_right=1, emulated=emulated, dtype=summed)

    @pl.when(first < end)
    def _compute() -> None:
        turns = -(-inputs // tile.inputs)
        total = lax.fori_loop(0, turns, step, jnp.zeros((tile.rows, tile.outputs), summed))
        mask = real[:, None] & (columns < outputs)[None, :]
        plgpu.store(out_ref.at[rows[:, None], columns[None, :]], total.astype(out_ref.dtype), mask=mask)


def grouped(
    x: Array,
    weight: Array,
    sizes: Array,
    scale: Array | None,
    minimum: Array | None,
    dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> Array:
    """Compute `ops.linear.grouped_linear` as one kernel."""
    if scale is not None:
        return multiply_packed(x, weight, scale, minimum, sizes, dtype, interpret=interpret)
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


OWNER, FIRST, END = range(3)  # rows of the tile table: expert, its tile's first row, the row after its last one


def tile_table(sizes: Array, rows: int, tile: int) -> Array:
    """Return the tiles of all experts, int32 [3, tiles]; unused tiles have no rows."""
    experts = sizes.shape[0]
    tiles = (sizes + tile - 1) // tile
    ends, row_ends = jnp.cumsum(tiles), jnp.cumsum(sizes)
    number = jnp.arange(rows // tile + min(experts, rows), dtype=jnp.int32)  # an expert wastes less than one
    owner = jnp.minimum(jnp.sum(number[:, None] >= ends[None, :], axis=1), experts - 1)
    first = (row_ends - sizes)[owner] + (number - (ends - tiles)[owner]) * tile
    return jnp.stack([owner, first, row_ends[owner]]).astype(jnp.int32)


def packed_tile_for(x: jax.ShapeDtypeStruct, experts: int) -> Int4Tile:
    """Return tiles of as many rows as an expert has on average, from 16 to 64; checked by compiling for an H100."""
    share = -(-x.shape[0] // experts)
    rows = max(16, min(64, 1 << (share - 1).bit_length()))
    if x.dtype.itemsize == 4:
        return Int4Tile(min(rows, 32), 32, 16, num_warps=4, num_stages=2)
    return Int4Tile(rows, 64, 32, num_warps=4, num_stages={16: 4, 32: 3, 64: 2}[rows])


def _packed_kernel(
    x_ref: jax.Ref,  # [J, M, W]
    words_ref: jax.Ref,  # int32 [G * N / 16, W * 16]
    scale_ref: jax.Ref,
    minimum_ref: jax.Ref | None,
    table_ref: jax.Ref,  # int32 [3, tiles]
    out_ref: jax.Ref,  # [M, N]
    *,
    tile: Int4Tile,
    words_of_group: int,
    emulated: bool,
) -> None:
    number, outputs = pl.program_id(1), out_ref.shape[1]
    expert, first, end = table_ref[OWNER, number], table_ref[FIRST, number], table_ref[END, number]
    rows = first + jnp.arange(tile.rows)
    columns = pl.program_id(0) * tile.outputs + jnp.arange(tile.outputs)

    @pl.when(first < end)
    def _compute() -> None:
        total = summed(
            x_ref, words_ref, scale_ref, minimum_ref, (0, -(-x_ref.shape[2] // tile.words)),
            rows=rows, real=rows < end,
            columns=columns, exists=None if outputs % tile.outputs == 0 else columns < outputs,
            first=expert * (outputs // int4.OUTPUTS),
            tile=tile, words_of_group=words_of_group, emulated=emulated,
        )  # fmt: skip
        mask = jnp.broadcast_to((rows < end)[:, None] & (columns < outputs)[None, :], total.shape)
        plgpu.store(out_ref.at[rows[:, None], columns[None, :]], total.astype(out_ref.dtype), mask=mask)


def multiply_packed(
    x: Array,  # [M, K]
    weight: Array,  # of a stack [G, N, K]
    scale: Array,
    minimum: Array | None,
    sizes: Array,
    dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> Array:
    """Compute the first sizes[0] rows times the first matrix, and so on → [M, N] in `dtype`."""
    (count, inputs), (experts, outputs, _) = x.shape, int4.matrix_shape(weight)
    per_word = inputs_in_word(weight)
    tile = packed_tile_for(jax.ShapeDtypeStruct(x.shape, x.dtype), experts)
    words_of_group = int4.group_of(weight, scale) // per_word
    table = tile_table(sizes, count, tile.rows)
    numbers = [
        None if part is None else int4.numbers(part.reshape(-1, part.shape[-1]), inputs) for part in (scale, minimum)
    ]
    result: Array = pl.pallas_call(
        functools.partial(_packed_kernel, tile=tile, words_of_group=words_of_group, emulated=interpret),
        grid=(-(-outputs // tile.outputs), table.shape[1]),
        out_shape=jax.ShapeDtypeStruct((count, outputs), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="int4_grouped",
    )(lay_out(x, per_word), as_words(weight), *numbers, table)
    return result
