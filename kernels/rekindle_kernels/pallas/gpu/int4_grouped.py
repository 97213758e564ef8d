"""GPU product of rows with the matrices of their experts, which are stored in four or eight bits in groups.

It is the product of `int4.py` with the tiles of `grouped.py`: only matrices of experts that have rows are read, in
their stored form. XLA would first widen those of all experts in memory.

Axes: M rows, sorted by expert, G experts, K inputs, N outputs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rekindle_kernels import int4
from rekindle_kernels.pallas.gpu.expert_tiles import END, FIRST, OWNER, tile_table
from rekindle_kernels.pallas.gpu.int4 import TYPES as TYPES
from rekindle_kernels.pallas.gpu.int4 import WORDS as WORDS
from rekindle_kernels.pallas.gpu.int4 import Tile, as_words, inputs_in_word, lay_out, summed


def tile_for(x: jax.ShapeDtypeStruct, experts: int) -> Tile:
    """Return tiles of as many rows as an expert has on average, from 16 to 64; checked by compiling for an H100."""
    share = -(-x.shape[0] // experts)
    rows = max(16, min(64, 1 << (share - 1).bit_length()))
    if x.dtype.itemsize == 4:
        return Tile(min(rows, 32), 32, 16, num_warps=4, num_stages=2)
    return Tile(rows, 64, 32, num_warps=4, num_stages={16: 4, 32: 3, 64: 2}[rows])


def _kernel(
    x_ref: jax.Ref,  # [J, M, W]
    words_ref: jax.Ref,  # int32 [G * N / 16, W * 16]
    scale_ref: jax.Ref,
    minimum_ref: jax.Ref | None,
    table_ref: jax.Ref,  # int32 [3, tiles]
    out_ref: jax.Ref,  # [M, N]
    *,
    tile: Tile,
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


def multiply(
    x: jax.Array,  # [M, K]
    weight: jax.Array,  # of a stack [G, N, K]
    scale: jax.Array,
    minimum: jax.Array | None,
    sizes: jax.Array,
    dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute the first sizes[0] rows times the first matrix, and so on → [M, N] in `dtype`."""
    (count, inputs), (experts, outputs, _) = x.shape, int4.matrix_shape(weight)
    per_word = inputs_in_word(weight)
    tile = tile_for(jax.ShapeDtypeStruct(x.shape, x.dtype), experts)
    words_of_group = int4.group_of(weight, scale) // per_word
    table = tile_table(sizes, count, tile.rows)
    numbers = [
        None if part is None else int4.numbers(part.reshape(-1, part.shape[-1]), inputs) for part in (scale, minimum)
    ]
    result: jax.Array = pl.pallas_call(
        functools.partial(_kernel, tile=tile, words_of_group=words_of_group, emulated=interpret),
        grid=(-(-outputs // tile.outputs), table.shape[1]),
        out_shape=jax.ShapeDtypeStruct((count, outputs), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="int4_grouped",
    )(lay_out(x, per_word), as_words(weight), *numbers, table)
    return result
