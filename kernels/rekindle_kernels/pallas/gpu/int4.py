"""GPU product of rows with a matrix of four or eight bits in groups; integers are widened in registers.

XLA writes a 16-bit copy of the whole matrix before each product, four times its bytes, and reads that again. Here a
program loads words of the stored matrix unchanged, widens them, and multiplies.

Axes: M rows, K inputs, N outputs, W words of an output, J inputs in a word (8 of four bits, 4 of eight), S parts of K.
A word has J consecutive inputs of one output, so input j of each word makes a matrix [W, N] of its own. The rows are
laid out to match, [J, M, W], and the J products are summed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rekindle_kernels import gpus, int4, tuning
from rekindle_kernels.ops.linear import LinearCall, LinearOptions, Operands
from rekindle_kernels.ops.registry import Implementation
from rekindle_kernels.pallas.gpu.block import and_masks, load, product

TYPES = ("bfloat16", "float16", "float32")
WORDS = {"uint8": 8, "int32": 4}  # inputs in a word, by the dtype of weights: those of four bits, and of eight
FEW_ROWS = 64  # up to this number, reading the matrix takes most of the time
WAVES = 2  # programs per multiprocessor into which a product of few rows is divided
LEAST_TURNS = 4  # the fewest turns of a program's loop


@dataclass(frozen=True, slots=True)
class Int4Tile:
    """The sizes of a program's results and of its loads."""

    rows: int
    outputs: int
    words: int
    num_warps: int
    num_stages: int
    parts: int = 1  # S


def tile_for(x: jax.ShapeDtypeStruct, outputs: int, words: int) -> Int4Tile:
    """Return the tile for rows x [M, K]: narrow for few rows, with the inputs in parts where there are too few tiles
    to fill a GPU. Checked by compiling for an H100."""
    count = x.shape[0]
    rows = max(16, min(128, 1 << (count - 1).bit_length()))
    if x.dtype.itemsize == 4:
        tile = Int4Tile(min(rows, 32), 32, 16, num_warps=4, num_stages=2)
    elif rows <= FEW_ROWS:
        tile = Int4Tile(rows, 64, 32, num_warps=4, num_stages={16: 4, 32: 3, 64: 2}[rows])
    else:
        tile = Int4Tile(rows, 128, 16, num_warps=8, num_stages=2)
    if count > FEW_ROWS:
        return tile
    programs = -(-outputs // tile.outputs) * -(-count // tile.rows)
    turns = -(-words // tile.words)
    parts = -(-WAVES * tuning.multiprocessors() // programs)
    share = -(-turns // max(1, min(parts, turns // LEAST_TURNS)))
    return replace(tile, parts=-(-turns // share))


def supports(call: LinearCall) -> str | None:
    """Return the reason why the kernel can't serve the call, or None."""
    if call.quantize != "int4":
        return "the matrix is not in groups"
    if call.weight.dtype.name not in WORDS:
        return f"{call.weight.dtype.name} is not widened in registers"
    if call.x.dtype.name not in TYPES:
        return f"rows are {call.x.dtype.name}, not one of {', '.join(TYPES)}"
    if call.norm:
        return "it takes rows that are normed"
    if call.gate is not None:
        return "it gates nothing"
    if call.expert or len(call.weight.shape) != 2:
        return "it takes one matrix"
    if max(call.weight.size, call.rows * call.outputs) >= 2**31:
        return f"{call.weight.size} columns of weights, or {call.rows} rows of results, are more than 31 bits count"
    return gpus.without_triton()


def summed(
    x_ref: jax.Ref,  # [J, M, W]
    words_ref: jax.Ref,  # int32 [N / 16, W * 16]
    scale_ref: jax.Ref,  # [N / 16, groups * 16]
    minimum_ref: jax.Ref | None,
    turns: tuple[Array | int, Array | int],  # of the loop over words, half open
    *,
    rows: Array,
    real: Array | None,  # True for the rows to be read; None: all
    columns: Array,  # outputs
    exists: Array | None,
    first: Array | int,  # row of `words_ref` that has output 0
    tile: Int4Tile,
    words_of_group: int,
    emulated: bool,
) -> Array:
    """Return the products of a tile of rows and outputs, float32, summed over these turns; inside a kernel."""
    per_word, words = x_ref.shape[0], x_ref.shape[2]
    block = lax.div(columns, jnp.int32(int4.OUTPUTS))
    lane = columns - block * int4.OUTPUTS

    def column(ref: jax.Ref, at: Array, inside: Array | None) -> Array:
        """Load the entries `at` [W] of each output, [W, N]."""
        index = first + block[None, :], at[:, None] * int4.OUTPUTS + lane[None, :]
        mask = and_masks(None if inside is None else inside[:, None], None if exists is None else exists[None, :])
        return load(ref, index, mask, (tile.words, tile.outputs))

    def step(turn: Array, total: Array) -> Array:
        at = turn * tile.words + jnp.arange(tile.words)
        inside = None if words % tile.words == 0 else at < words
        stored = column(words_ref, at, inside)
        groups = lax.div(at, jnp.int32(words_of_group))
        scale = column(scale_ref, groups, inside).astype(jnp.float32)
        minimum = None if minimum_ref is None else column(minimum_ref, groups, inside).astype(jnp.float32)
        mask = and_masks(None if real is None else real[:, None], None if inside is None else inside[None, :])
        for number in range(per_word):
            q = _input(stored, number, per_word)
            if minimum is None:
                values = (q - (0 if per_word == 4 else int4.OFFSET)).astype(jnp.float32) * scale
            else:
                values = q.astype(jnp.float32) * scale + minimum
            x = load(x_ref, (number, rows[:, None], at[None, :]), mask, (tile.rows, tile.words))
            total = total + product(x, values.astype(x.dtype), contract_right=0, emulated=emulated)
        return total

    return lax.fori_loop(*turns, step, jnp.zeros((tile.rows, tile.outputs), jnp.float32))


def _kernel(
    x_ref: jax.Ref,  # [J, M, W]
    words_ref: jax.Ref,
    scale_ref: jax.Ref,
    minimum_ref: jax.Ref | None,
    out_ref: jax.Ref,  # [S, M, N]
    *,
    tile: Int4Tile,
    words_of_group: int,
    emulated: bool,
) -> None:
    _, count, words = x_ref.shape
    part, outputs = pl.program_id(2), out_ref.shape[2]
    rows = pl.program_id(1) * tile.rows + jnp.arange(tile.rows)
    columns = pl.program_id(0) * tile.outputs + jnp.arange(tile.outputs)
    turns = -(-words // tile.words)
    share = -(-turns // tile.parts)
    total = summed(
        x_ref, words_ref, scale_ref, minimum_ref, (part * share, jnp.minimum((part + 1) * share, turns)),
        rows=rows, real=None if count % tile.rows == 0 else rows < count,
        columns=columns, exists=None if outputs % tile.outputs == 0 else columns < outputs, first=0,
        tile=tile, words_of_group=words_of_group, emulated=emulated,
    )  # fmt: skip
    mask = jnp.broadcast_to((rows < count)[:, None] & (columns < outputs)[None, :], total.shape)
    plgpu.store(out_ref.at[part, rows[:, None], columns[None, :]], total.astype(out_ref.dtype), mask=mask)


def _input(stored: Array, number: int, per_word: int) -> Array:
    """Return input `number` of each word, int32: 0 to 15 of four bits, -128 to 127 of eight."""
    if per_word == 4:
        return lax.shift_right_arithmetic(lax.shift_left(stored, jnp.int32(24 - 8 * number)), jnp.int32(24))
    bits = 8 * (number % 4) + 4 * (number // 4)
    return lax.shift_right_logical(stored, jnp.int32(bits)) & 15


def inputs_in_word(weight: Array) -> int:
    """Return J of a stored matrix."""
    return WORDS[weight.dtype.name]


def as_words(weight: Array) -> Array:
    """View a stored matrix, or a stack of them one under the other, as int32 [N / 16, W * 16]; nothing is copied."""
    rows = weight.reshape(-1, weight.shape[-1])
    return rows if rows.dtype == jnp.int32 else lax.bitcast_convert_type(rows.reshape(len(rows), -1, 4), jnp.int32)


def lay_out(x: Array, per_word: int) -> Array:
    """Return rows [M, K] as [J, M, W]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, per_word), -1, 0)


def multiply(
    x: Array,  # [M, K]
    weight: Array,
    scale: Array,
    minimum: Array | None,
    dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> Array:
    """Compute x · a matrix of `rekindle_kernels.int4` → [M, N] in `dtype`, or in float32 where it is in parts."""
    (count, inputs), outputs = x.shape, weight.shape[0] * int4.OUTPUTS
    per_word = inputs_in_word(weight)
    words_of_group = int4.group_of(weight, scale) // per_word
    tile = tile_for(jax.ShapeDtypeStruct(x.shape, x.dtype), outputs, inputs // per_word)
    scale, minimum = int4.numbers(scale, inputs), None if minimum is None else int4.numbers(minimum, inputs)
    result = jax.ShapeDtypeStruct((tile.parts, count, outputs), dtype if tile.parts == 1 else jnp.float32)
    parts: Array = pl.pallas_call(
        functools.partial(_kernel, tile=tile, words_of_group=words_of_group, emulated=interpret),
        grid=(-(-outputs // tile.outputs), -(-count // tile.rows), tile.parts),
        out_shape=result,
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="int4_linear",
    )(lay_out(x, per_word), as_words(weight), scale, minimum)
    return parts[0] if tile.parts == 1 else jnp.sum(parts, axis=0)


def run(operands: Operands, options: LinearOptions, dtype: jnp.dtype, *, interpret: bool = False) -> Array:
    """Compute `ops.linear.linear`; every row is computed, regardless of `count`."""
    x, weight, scale, minimum, residual, _, _, expert = operands
    assert scale is not None, "integers have scales"
    assert expert is None, "the operation takes the matrix out of the stack"
    y = multiply(x.reshape(-1, x.shape[-1]), weight, scale, minimum, dtype, interpret=interpret)
    y = y.reshape(*x.shape[:-1], y.shape[-1]).astype(dtype)
    return y if residual is None else residual + y


LINEAR = Implementation("pallas_gpu", run, supports)
# The same kernel as plain JAX operations, on any device: slow, for tests.
INTERPRETED = Implementation("pallas_gpu_interpret", functools.partial(run, interpret=True), supports)
