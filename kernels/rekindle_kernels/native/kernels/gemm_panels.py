"""Up to a few hundred rows times a matrix: panels of rows are turned, the matrix is taken as it is stored.

The product spreads a word of the matrix over a vector and multiplies it with the words of 16 rows: the matrix is never
repacked, and read once for 64 rows. Where the last vector would have eight rows or fewer, half a vector is multiplied:
24 rows take 0.86 of the time of 32 (bfloat16 matrices from memory, Zen 4). Up to four rows after the last vector of 16
are not turned at all. However many rows there are, a result's products are added in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from rekindle_kernels.native.cpu import has_feature, on_arm
from rekindle_kernels.native.kernels.gemm_packing import PANEL, count_packs, finisher, left_over, packer, panels_of
from rekindle_kernels.native.language import arm
from rekindle_kernels.native.language.dot_products import add_ints, total_of_ints, transpose, unsigned
from rekindle_kernels.native.language.handler import first_unit
from rekindle_kernels.native.language.jit import emits, inline, jit
from rekindle_kernels.native.language.memory import (
    LINE,
    WORD,
    f32,
    free,
    i32,
    malloc,
    prefetch,
    set_i32,
    set_word,
    word,
)
from rekindle_kernels.native.language.records import dim
from rekindle_kernels.native.language.vector import (
    HALF_LANES,
    LANES,
    in_register,
    load_f32,
    load_half,
    lower_half,
    splat,
    splat_half,
    store,
)
from rekindle_kernels.native.layout import SIZES

WORD_BYTES = SIZES["word"]
TOGETHER = 2 * PANEL  # rows for which a piece of the matrix is read once
OUTPUTS = 16  # of a tile: a whole cache line of the result
# Bytes of what a block keeps of 16 outputs: sums [16, 32], half of them turned [16, 16], and sums of the weights [16].
SUMS = (OUTPUTS * PANEL + LANES * OUTPUTS + OUTPUTS) * 4
ZERO = np.float32(0)
TURNED_AT, WEIGHT_SUMS_AT = OUTPUTS * PANEL * 4, SUMS - OUTPUTS * 4


def functions(size: int, add: Any) -> Any:
    """Return `prepare(job, threads) -> blocks`, `pack(job, index)` and `multiply(job, index)` of panels, for
    `gemm.kernel`."""

    @inline
    def prepare(job: Any, threads: int) -> int:
        rows = job.rows
        groups = max(1, (rows - left_over(job) + TOGETHER - 1) // TOGETHER)
        parts = min(job.results // OUTPUTS, (4 * threads + groups - 1) // groups)
        job.parts = parts
        words = job.width * size // 4 * (panels_of(job) * PANEL + left_over(job))
        job.packed = malloc((words + rows + LANES) * 4)
        job.row_scales = job.packed + words * 4
        return count_packs(job) + groups * parts

    return prepare, packer(size), multiplier(size, add)


@inline
def is_in(slots: int, count: int, slot: int) -> bool:
    """True if a token has that adapter."""
    found = False
    for token in range(count):
        found = found or i32(slots, token) == slot
    return found


@inline
def list_pieces(job: Any, begin: int, size: int, piece: int) -> None:
    """Append the pieces of a run of memory to the list of pieces that the product prefetches."""
    at = 0
    while at < size:
        set_word(job.wanted, job.pieces, begin + max(0, min(at, size - piece)))
        job.pieces += 1
        at += piece


@jit
def list_rows_of_rank(frame: Any, job: Any, size: int) -> None:
    """List where the rows of rank of the step's adapters lie, in pieces that the product prefetches, one in a tile.

    A product of 16 rows waits for its arithmetic and adapters wait for memory. 30 layers of 135M in bfloat16, 16 rows
    over 8 adapters of rank 16, two cores of a Zen 4: adapters add 2.3 ms to a step instead of 3.2.
    """
    rows, units, inputs, outputs = dim(frame.up, 0), dim(frame.owners, 1), dim(frame.down, 1), dim(frame.up, 1)
    modules, owners = dim(frame.down, 0) // rows, frame.owners.data + 4 * units * frame.settings.place
    number = frame.settings.number_bytes
    down, up = number * inputs * rows // units, number * outputs * rows // units  # bytes of a unit
    words, tiles = job.width * size // 4, (job.results + job.ups) // OUTPUTS
    count = 0
    for unit in range(units):
        slot = i32(owners, unit)
        count += 1 if slot > 0 and is_in(frame.slots.data, dim(frame.slots, 0), slot) else 0
    slow = LINE // 2  # each line is asked for twice, unless there are too many
    pace = slow if count * (modules * down + up) <= tiles * words * slow else LINE
    piece = words * pace
    job.pace = pace
    job.wanted = malloc(WORD_BYTES * (1 + count * (modules * (down // piece + 1) + up // piece + 1)))
    for unit in range(units):
        slot = i32(owners, unit)
        if slot > 0 and is_in(frame.slots.data, dim(frame.slots, 0), slot):
            for module in range(modules):
                list_pieces(job, frame.down.data + down * (module * units + unit), down, piece)
            list_pieces(job, frame.up.data + up * unit, up, piece)


@inline
def for_two_vectors(y: Any) -> Any:
    """Return a spread word of the matrix for a vector of rows, and for another."""
    return y, y


@inline
def for_vector_and_half(y: Any) -> Any:
    """Return a spread word of the matrix for a vector of rows, and for half a vector."""
    y = in_register(y)
    return y, lower_half(y)


class Lanes(NamedTuple):
    """The functions for a whole vector of 16 rows, or for half a vector of eight."""

    load: Any
    splat: Any
    with_vector: Any  # makes a spread word fit for a whole vector and for one of these


SIXTEEN, EIGHT = Lanes(load_f32, splat, for_two_vectors), Lanes(load_half, splat_half, for_vector_and_half)


def two_vectors(size: int, add: Any, second: Lanes, ahead: bool) -> Any:
    """Return `tile(w, x, words, sums)`: 32 or 24 rows for 16 outputs, sums [16, 32]. If `ahead`, it prefetches the next
    outputs' weights little by little: all at once would wait for the memory."""
    load, spread, with_vector = second

    @inline
    def add_word(a: Any, b: Any, x0: Any, x1: Any, w: int, j: int) -> Any:
        """Add the products of a word of the matrix to the sums of both vectors."""
        y, z = with_vector(splat(f32(w, j)))
        return add(a, x0, y), add(b, x1, z)

    @inline
    def store_both(sums: int, output: int, a: Any, b: Any) -> None:
        store(sums, output * PANEL, a)
        store(sums, output * PANEL + LANES, b)

    @jit
    def eight_outputs(w: int, x: int, words: int, sums: int) -> None:
        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = splat(ZERO)
        b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = spread(ZERO)
        step = words * 4
        v = w + 4 * step
        for j in range(words):
            x0, x1 = load_f32(x, j * PANEL), load(x, j * PANEL + LANES)
            if ahead:
                prefetch(w + 16 // size * step + j * 32)
            a0, b0 = add_word(a0, b0, x0, x1, w, j)
            a1, b1 = add_word(a1, b1, x0, x1, w + step, j)
            a2, b2 = add_word(a2, b2, x0, x1, w + 2 * step, j)
            a3, b3 = add_word(a3, b3, x0, x1, w + 3 * step, j)
            a4, b4 = add_word(a4, b4, x0, x1, v, j)
            a5, b5 = add_word(a5, b5, x0, x1, v + step, j)
            a6, b6 = add_word(a6, b6, x0, x1, v + 2 * step, j)
            a7, b7 = add_word(a7, b7, x0, x1, v + 3 * step, j)
        store_both(sums, 0, a0, b0)
        store_both(sums, 1, a1, b1)
        store_both(sums, 2, a2, b2)
        store_both(sums, 3, a3, b3)
        store_both(sums, 4, a4, b4)
        store_both(sums, 5, a5, b5)
        store_both(sums, 6, a6, b6)
        store_both(sums, 7, a7, b7)

    @jit
    def tile(w: int, x: int, words: int, sums: int) -> None:
        eight_outputs(w, x, words, sums)
        eight_outputs(w + 8 * words * 4, x, words, sums + 8 * PANEL * 4)

    return tile


def one_vector(add: Any, only: Lanes, *, asking: bool) -> Any:
    """Return `tile(w, x, words, sums, later, pace)`: 16 or eight rows for 16 outputs, as one half of sums [16, 32]. If
    `asking`, it prefetches the memory at `later`, `pace` bytes for each word."""
    load, spread, _ = only

    @inline
    def word(w: int, j: int) -> Any:
        return spread(f32(w, j))

    @inline
    def store_four_outputs(sums: int, a: Any, b: Any, c: Any, d: Any) -> None:
        store(sums, 0, a)
        store(sums, PANEL, b)
        store(sums, 2 * PANEL, c)
        store(sums, 3 * PANEL, d)

    @jit
    def tile(w: int, x: int, words: int, sums: int, later: int, pace: int) -> None:
        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = spread(ZERO)
        b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = spread(ZERO)
        step = words * 4
        v = w + 4 * step
        t = w + 8 * step
        u = w + 12 * step
        for j in range(words):
            y = load(x, j * PANEL)
            prefetch(w + 16 * step + j * 64)
            if asking:
                prefetch(later + j * pace)
            a0, a1 = add(a0, y, word(w, j)), add(a1, y, word(w + step, j))
            a2, a3 = add(a2, y, word(w + 2 * step, j)), add(a3, y, word(w + 3 * step, j))
            a4, a5 = add(a4, y, word(v, j)), add(a5, y, word(v + step, j))
            a6, a7 = add(a6, y, word(v + 2 * step, j)), add(a7, y, word(v + 3 * step, j))
            b0, b1 = add(b0, y, word(t, j)), add(b1, y, word(t + step, j))
            b2, b3 = add(b2, y, word(t + 2 * step, j)), add(b3, y, word(t + 3 * step, j))
            b4, b5 = add(b4, y, word(u, j)), add(b5, y, word(u + step, j))
            b6, b7 = add(b6, y, word(u + 2 * step, j)), add(b7, y, word(u + 3 * step, j))
        store_four_outputs(sums, a0, a1, a2, a3)
        store_four_outputs(sums + 4 * PANEL * 4, a4, a5, a6, a7)
        store_four_outputs(sums + 8 * PANEL * 4, b0, b1, b2, b3)
        store_four_outputs(sums + 12 * PANEL * 4, b4, b5, b6, b7)

    return tile


# Tiles of many rows times a matrix on AArch64: 8 rows times 8 outputs in its registers of four lanes.
#
# The rows lie in panels, the matrix is taken as it is stored. Sums of 8 outputs for two times four rows are 16
# registers, four words of each output 8 more: an instruction takes a word out of them by itself. So 64 instructions
# that multiply need 16 loads, and the matrix is neither turned nor spread; for `bfdot` LLVM spreads words by
# instructions of their own, 32 of them. With `i8mm` an instruction multiplies two rows by two outputs, two words of
# each: 32 of them, for which words are brought together 16 times.

ARM_OUTPUTS = 8
ARM_VECTORS = 2  # registers with a row in each lane
ARM_ROWS = ARM_VECTORS * arm.REGISTER
ARM_SUMS = ARM_OUTPUTS * ARM_VECTORS  # registers


def tile_on_arm(panel: int, size: int) -> Any:
    """Return `tile(w, x, words, sums)`: 8 outputs, stored from w on, times the first 8 rows of a panel at x, with
    `words` words each: sums [8, panel]. `words` is a multiple of four; numbers have `size` bytes.
    """
    by_matrices = size == 1 and has_feature("i8mm")
    add = _add_matrices if by_matrices else _adder(arm.dot if size == 1 else arm.dot_bf16)

    @emits(types.void, types.int64, types.int64, types.int64, types.int64)
    def tile(builder: Any, w: Any, x: Any, words: Any, sums: Any) -> None:
        def register(start: Any, number: Any) -> Any:
            """Return the register that begins at word `number`."""
            address = builder.add(start, builder.mul(number, WORD(4)))
            return builder.inttoptr(address, arm.INTS.as_pointer())

        totals = [cgutils.alloca_once(builder, arm.INTS) for _ in range(ARM_SUMS)]
        for total in totals:
            builder.store(ir.Constant(arm.INTS, [0] * arm.REGISTER), total)
        with cgutils.for_range(builder, builder.udiv(words, WORD(arm.REGISTER))) as loop:
            first = builder.mul(loop.index, WORD(arm.REGISTER))
            columns = [
                builder.load(register(w, builder.add(builder.mul(words, WORD(o)), first)), align=4)
                for o in range(ARM_OUTPUTS)
            ]

            def rows(i: int) -> list[Any]:
                """Word i of each row."""
                start = builder.mul(builder.add(first, WORD(i)), WORD(panel))
                starts = [builder.add(start, WORD(v * arm.REGISTER)) for v in range(ARM_VECTORS)]
                return [builder.load(register(x, place), align=4) for place in starts]

            before = [builder.load(total) for total in totals]
            for total, value in zip(totals, add(builder, columns, rows, before), strict=True):
                builder.store(value, total)
        found = [builder.load(total) for total in totals]
        for number, value in enumerate(_in_rows(builder, found) if by_matrices else found):
            place = WORD(number // ARM_VECTORS * panel + number % ARM_VECTORS * arm.REGISTER)
            builder.store(value, register(sums, place), align=4)

    return tile


def _adder(dot: Any) -> Any:
    """Return a function that adds the products of four words by `dot`; sums are [outputs, vectors]."""

    def add(builder: Any, columns: list[Any], rows: Callable[[int], list[Any]], sums: list[Any]) -> list[Any]:
        for i in range(arm.REGISTER):
            vectors = rows(i)
            words = [arm.everywhere(builder, column, i) for column in columns]
            sums = [
                dot(builder, sums[o * ARM_VECTORS + v], vectors[v], words[o])
                for o in range(ARM_OUTPUTS)
                for v in range(ARM_VECTORS)
            ]
        return sums

    return add


def _add_matrices(builder: Any, columns: list[Any], rows: Callable[[int], list[Any]], sums: list[Any]) -> list[Any]:
    """Return the same by `multiply_matrices`; sums are [pairs of outputs, pairs of rows]."""
    for i in range(0, arm.REGISTER, 2):
        even, odd = rows(i), rows(i + 1)
        pairs = [
            arm.pick(builder, even[v], odd[v], lanes)
            for v in range(ARM_VECTORS)
            for lanes in ([0, 4, 1, 5], [2, 6, 3, 7])
        ]
        words = [
            arm.pick(builder, columns[o], columns[o + 1], [i, i + 1, i + 4, i + 5]) for o in range(0, ARM_OUTPUTS, 2)
        ]
        sums = [
            arm.multiply_matrices(builder, sums[p * len(pairs) + r], pairs[r], words[p])
            for p in range(len(words))
            for r in range(len(pairs))
        ]
    return sums


def _in_rows(builder: Any, sums: list[Any]) -> list[Any]:
    """Return sums [pairs of outputs, pairs of rows], two by two in each register, as [outputs, vectors]."""
    return [
        arm.pick(
            builder, sums[o // 2 * 4 + 2 * v], sums[o // 2 * 4 + 2 * v + 1], [o % 2 + lane for lane in (0, 2, 4, 6)]
        )
        for o in range(ARM_OUTPUTS)
        for v in range(ARM_VECTORS)
    ]


def tile_multiplier(size: int, add: Any) -> Any:
    """Return `multiply(w, x, words, sums, rows, first, later, pace)`: the first `rows` of a panel at x, at most 32,
    times 16 outputs stored from w on. The `first` of a group's panels prefetches the next outputs' weights. If `later`
    is not 0, up to 16 rows also prefetch the memory there, `pace` bytes for each word.
    """
    if on_arm():
        eight = tile_on_arm(PANEL, size)

        @jit
        def on_arm_multiply(
            w: int, x: int, words: int, sums: int, rows: int, first: bool, later: int, pace: int
        ) -> None:
            for o in range(0, OUTPUTS, ARM_OUTPUTS):
                for r in range(0, min(rows, PANEL), ARM_ROWS):
                    eight(w + o * words * 4, x + r * 4, words, sums + (o * PANEL + r) * 4)

        return on_arm_multiply
    of_eight, of_sixteen = one_vector(add, EIGHT, asking=False), one_vector(add, SIXTEEN, asking=False)
    asking_of_eight, asking_of_sixteen = one_vector(add, EIGHT, asking=True), one_vector(add, SIXTEEN, asking=True)
    of_24, first_of_24 = two_vectors(size, add, EIGHT, ahead=False), two_vectors(size, add, EIGHT, ahead=True)
    of_32, first_of_32 = two_vectors(size, add, SIXTEEN, ahead=False), two_vectors(size, add, SIXTEEN, ahead=True)

    @jit
    def multiply(w: int, x: int, words: int, sums: int, rows: int, first: bool, later: int, pace: int) -> None:
        if rows <= HALF_LANES:
            if later > 0:
                asking_of_eight(w, x, words, sums, later, pace)
            else:
                of_eight(w, x, words, sums, 0, 0)
        elif rows <= LANES:
            if later > 0:
                asking_of_sixteen(w, x, words, sums, later, pace)
            else:
                of_sixteen(w, x, words, sums, 0, 0)
        elif rows <= LANES + HALF_LANES:
            if first:
                first_of_24(w, x, words, sums)
            else:
                of_24(w, x, words, sums)
        elif first:
            first_of_32(w, x, words, sums)
        else:
            of_32(w, x, words, sums)

    return multiply


def floats_left_over(add: Any) -> Any:
    """Return `few(x, w, words, count, sums, tile, alone)`: the rows that are left over times 16 outputs, sums
    [count, 16].

    Products are added word by word, as in a panel and in a strip, so that a row's results are the same to the last bit
    however many rows there are. For that, 16 words of the 16 outputs are turned at a time.
    """

    @inline
    def turn(w: int, words: int, j: int, tile: int, alone: bool) -> None:
        transpose(w + j * 4, words, tile, OUTPUTS)
        if alone:
            for i in range(LANES):
                prefetch(w + OUTPUTS * words * 4 + (j + i) * 64)

    @inline
    def one_row(x: int, w: int, words: int, sums: int, tile: int, alone: bool) -> None:
        a = splat(ZERO)
        for j in range(0, words, LANES):
            turn(w, words, j, tile, alone)
            for i in range(LANES):
                a = add(a, splat(f32(x, j + i)), load_f32(tile, i * OUTPUTS))
        store(sums, 0, a)

    @inline
    def two_rows(x: int, w: int, words: int, sums: int, tile: int, alone: bool) -> None:
        a = b = splat(ZERO)
        for j in range(0, words, LANES):
            turn(w, words, j, tile, alone)
            for i in range(LANES):
                v = load_f32(tile, i * OUTPUTS)
                a, b = add(a, splat(f32(x, j + i)), v), add(b, splat(f32(x, words + j + i)), v)
        store(sums, 0, a)
        store(sums, OUTPUTS, b)

    @jit
    def few(x: int, w: int, words: int, count: int, sums: int, tile: int, alone: bool) -> None:
        for r in range(0, count, 2):
            here, out = x + r * words * 4, sums + r * OUTPUTS * 4
            if r + 1 < count:
                two_rows(here, w, words, out, tile, alone and r == 0)
            else:
                one_row(here, w, words, out, tile, alone and r == 0)

    return few


def integers_left_over(add: Any) -> Any:
    """Return the same for 8-bit rows: along the columns and without transposing, because integer sums are exact in any
    order.
    """

    @jit
    def few(x: int, w: int, words: int, count: int, sums: int, tile: int, alone: bool) -> None:
        for r in range(count):
            row, out = x + r * words * 4, sums + r * OUTPUTS * 4
            for o in range(0, OUTPUTS, 4):
                a = b = c = d = splat(ZERO)
                v = w + o * words * 4
                for j in range(0, words, LANES):
                    if alone and r == 0:  # else another's product has just asked for these weights
                        for i in range(4, 8):
                            prefetch(v + (i * words + j) * 4)
                    y = load_f32(row, j)
                    a, b = add(a, y, load_f32(v, j)), add(b, y, load_f32(v, words + j))
                    c, d = add(c, y, load_f32(v, 2 * words + j)), add(d, y, load_f32(v, 3 * words + j))
                set_i32(out, o, total_of_ints(a))
                set_i32(out, o + 1, total_of_ints(b))
                set_i32(out, o + 2, total_of_ints(c))
                set_i32(out, o + 3, total_of_ints(d))

    return few


@inline
def sum_weights(w: int, words: int, weight_sums: int) -> None:
    """Sum the 8-bit weights of 16 outputs; `gemm_packing.finisher` corrects their results with these sums."""
    for o in range(OUTPUTS):
        a = splat(ZERO)
        for j in range(0, words, LANES):
            a = add_ints(a, load_f32(w, o * words + j))
        set_i32(weight_sums, o, total_of_ints(a))


def multiplier(size: int, add: Any) -> Any:
    """Return `multiply(job, index)`: a group of rows times a part of the outputs."""
    corrected = size == 1 and unsigned()
    multiply_tile = tile_multiplier(size, add)
    few = floats_left_over(add) if size == 2 else integers_left_over(add)
    finish_vector = finisher(size)

    @jit
    def put(job: Any, sums: int, weight_sums: int, n: int, r: int, turned: int) -> None:
        """The results of 16 rows from r on for the outputs [n, n + OUTPUTS), as rows of whole cache lines."""
        transpose(sums, PANEL, turned, OUTPUTS)
        if job.ups > 0:
            transpose(sums + SUMS, PANEL, turned + SUMS, OUTPUTS)
        for i in range(min(LANES, job.rows - r)):
            finish_vector(job, turned + i * OUTPUTS * 4, weight_sums, SUMS, r + i, n)

    @inline
    def weights_of(job: Any, n: int, half: int) -> int:
        """Return the address of the weights of output n, or, in the other half, of its up."""
        return job.weight + (n + half * job.results) * (job.width * size // 4) * 4

    @inline
    def wanted_at(job: Any, n: int, halves: int, half: int) -> int:
        """Return the address of the piece of memory to prefetch while a tile is multiplied, or 0."""
        tile, tiles = n // OUTPUTS * halves + half, job.results // OUTPUTS * halves
        piece = tile * job.pieces // tiles
        return word(job.wanted, piece) if piece < (tile + 1) * job.pieces // tiles else 0

    @jit
    def multiply_group(job: Any, n: int, halves: int, first: int, end: int, scratch: int) -> None:
        """The rows [first, end) in panels times 16 outputs from n on."""
        words = job.width * size // 4
        turned, weight_sums = scratch + TURNED_AT, scratch + WEIGHT_SUMS_AT
        for r in range(first, end, PANEL):
            x = job.packed + r * words * 4
            for half in range(halves):
                w, sums = weights_of(job, n, half), scratch + half * SUMS
                multiply_tile(w, x, words, sums, end - r, r == first, wanted_at(job, n, halves, half), job.pace)
            put(job, scratch, weight_sums, n, r, turned)
            if end - r > LANES:
                put(job, scratch + LANES * 4, weight_sums, n, r + LANES, turned)

    @jit
    def multiply_left_over(job: Any, n: int, halves: int, whole: int, scratch: int) -> None:
        """The rows from `whole` on, which no panel holds, times 16 outputs from n on."""
        rows, words = job.rows, job.width * size // 4
        turned, weight_sums = scratch + TURNED_AT, scratch + WEIGHT_SUMS_AT
        x = job.packed + panels_of(job) * PANEL * words * 4
        for half in range(halves):
            few(x, weights_of(job, n, half), words, rows - whole, turned + half * SUMS, scratch, whole == 0)
        for r in range(whole, rows):
            finish_vector(job, turned + (r - whole) * OUTPUTS * 4, weight_sums, SUMS, r, n)

    @jit
    def multiply(job: Any, index: int) -> None:
        rows, words = job.rows, job.width * size // 4
        parts, units = job.parts, job.results // OUTPUTS
        group, part = index // parts, index % parts
        halves = 2 if job.ups > 0 else 1
        scratch = malloc(2 * SUMS)  # of both halves
        whole = rows - left_over(job)
        first, end = group * TOGETHER, min(whole, group * TOGETHER + TOGETHER)
        for unit in range(first_unit(part, parts, units), first_unit(part + 1, parts, units)):
            n = unit * OUTPUTS
            if corrected:
                for half in range(halves):
                    sum_weights(weights_of(job, n, half), words, scratch + WEIGHT_SUMS_AT + half * SUMS)
            multiply_group(job, n, halves, first, end, scratch)
            if end == whole:
                multiply_left_over(job, n, halves, whole, scratch)
        free(scratch)

    return multiply
