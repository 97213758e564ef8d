"""Many rows times a 4-bit matrix by AMX: tiles of 16 rows, two blocks of 16 outputs and pairs of groups of inputs.

A tile register holds 16 rows of 64 bytes. One instruction adds to 16 x 16 integers the products of 16 rows and 16
outputs over 64 inputs; rows are taken as they were packed, weights as `int4_tile.unpack` leaves them. What a group adds
up to is exact, and it is scaled and added to earlier groups as in `int4_tile`, rounding in the same places. So results
are the same to the last bit as without AMX, and a caller may choose either by what is faster.

The code for any processor with AVX-512 has these instructions. They run where the caller says that the processor has
them and the system, asked by `language.amx.allowed`, lets this process use them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rekindle_kernels.native.kernels.int4_tile import (
    SCALE,
    UNPACKED,
    VALUES,
    Codebook,
    everywhere,
    scale_reader,
    unpacker,
)
from rekindle_kernels.native.language.amx import DEPTH, MEMORY, add_products, load_tile, store_tile, zero_tile
from rekindle_kernels.native.language.handler import first_unit
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import LINE, WORD, prefetch
from rekindle_kernels.native.language.vector import FLOATS, LANES, llvm_call, splat, store

ROWS = 16  # of a tile
PANEL = 256  # inputs whose weights are unpacked at a time: with a tile of rows they stay in the first cache
_ROWS_AT, _WEIGHTS_AT = 6, 7  # registers; four others have the sums of a pair of groups, for two blocks of outputs
_INPUT = UNPACKED // 8  # bytes of an unpacked input of two blocks
_SUMS = ROWS * LANES * 4  # bytes of the sums of one block
ZERO = np.float32(0)
_INTS = ir.VectorType(ir.IntType(32), LANES)

# Memory of a block of work: the shapes of the tile registers, those of before, integers of two pairs as they leave the
# registers, unpacked weights, and the sums of all rows.
INTEGERS = MEMORY
_WEIGHTS = INTEGERS + 8 * _SUMS
_TOTALS = _WEIGHTS + (PANEL + 256) * _INPUT


class Groups(NamedTuple):
    """Groups of inputs that are multiplied and added to sums: what `single` and `pairs` are called with."""

    x: int  # packed rows, the first of a tile
    stride: int  # bytes from a row to the next
    first: int  # the group that comes first
    groups: int  # of a whole row
    per: int  # tiles of inputs of a group
    depth: int  # inputs of a tile
    weights: int  # the first group's, unpacked
    scales: int  # of the first block of outputs; minimums alike, or 0
    minimums: int
    further: int  # bytes from the scales of one block of outputs to those of the other
    integers: int  # memory for what leaves the registers
    totals: int  # sums [tiles, 2, ROWS, 16]


class _GroupsCode:
    """Writes the code that adds groups of inputs to the sums of tiles of ROWS rows and two blocks of outputs.

    A pair of groups is multiplied into four registers, and these are stored. To scale and add what was stored takes as
    long and other parts of the processor, so `pairs` writes the two in turn: a pair is multiplied while the one before
    it is scaled. The processor would not look so far ahead by itself.
    """

    def __init__(self, builder: Any, scale: str, values: Groups) -> None:
        self._builder, self._values = builder, values
        self._group = builder.mul(values.per, values.depth)  # inputs
        self._fma = llvm_call(f"llvm.fma.v{LANES}f32", FLOATS, FLOATS, FLOATS, FLOATS)
        self._scales_at = scale_reader(builder, scale, self._group)

    def single(self) -> None:
        """The first group, for the first tile of rows."""
        zero = WORD(0)
        self._multiply(zero, zero, 0, 0)
        for register in range(2):
            self._leave(register, zero)
        for low in self._minimums_or_none():
            self._add_rows(self._factors(zero, 1, low), zero, zero, zero, range(ROWS))

    def pairs(self, count: Any, tiles: Any) -> None:
        """Multiply `count` pairs of groups, one after the other, for `tiles` tiles of rows; both are at least one."""
        builder, zero, one = self._builder, WORD(0), WORD(1)
        pair_at, tile_at = (cgutils.alloca_once_value(builder, zero) for _ in range(2))
        for each in range(2):
            self._multiply(zero, zero, each, 2 * each)
        for register in range(4):
            self._leave(register, zero)
        steps = builder.sub(builder.mul(count, tiles), one)
        for low in self._minimums_or_none():
            with cgutils.for_range(builder, steps) as loop:
                pair, tile, half = builder.load(pair_at), builder.load(tile_at), builder.and_(loop.index, one)
                following = builder.add(pair, one)
                is_next = builder.icmp_unsigned("==", following, count)
                builder.store(builder.select(is_next, zero, following), pair_at)
                builder.store(builder.add(tile, builder.zext(is_next, WORD)), tile_at)
                factors = self._factors(pair, 2, low)
                for quarter in range(4):
                    if quarter < 2:
                        self._multiply(builder.load(tile_at), builder.load(pair_at), quarter, 2 * quarter)
                    else:
                        for register in (2 * quarter - 4, 2 * quarter - 3):
                            self._leave(register, builder.xor(half, one))
                    self._add_rows(factors, tile, pair, half, range(ROWS // 4 * quarter, ROWS // 4 * (quarter + 1)))
            pair, tile = builder.load(pair_at), builder.load(tile_at)
            self._add_rows(self._factors(pair, 2, low), tile, pair, builder.and_(steps, one), range(ROWS))

    def _at(self, start: Any, *steps: Any) -> Any:
        for step in steps:
            start = self._builder.add(start, step if isinstance(step, ir.Value) else WORD(step))
        return start

    def _minimums_or_none(self) -> Iterator[bool]:
        """Writes what follows twice: for minimums, and for none."""
        there = self._builder.icmp_signed("!=", self._values.minimums, WORD(0))
        with self._builder.if_else(there) as (with_minimums, without):
            with with_minimums:
                yield True
            with without:
                yield False

    def _rows_of(self, tile: Any) -> Any:
        return self._at(self._values.x, self._builder.mul(tile, self._builder.mul(self._values.stride, WORD(ROWS))))

    def _multiply(self, tile: Any, pair: Any, each: int, register: int) -> None:
        """The products of a tile of rows and one group of a pair, into this register and the next."""
        builder = self._builder
        for block in range(2):
            zero_tile(builder, register + block)
        begin = builder.mul(self._group, self._at(builder.mul(pair, WORD(2)), each))
        x = self._at(self._rows_of(tile), builder.mul(self._values.first, self._group))
        with cgutils.for_range(builder, self._values.per) as loop:
            inside = self._at(begin, builder.mul(loop.index, self._values.depth))
            load_tile(builder, _ROWS_AT, self._at(x, inside), self._values.stride)
            column = self._at(self._values.weights, builder.mul(inside, WORD(_INPUT)))
            for block in range(2):
                load_tile(builder, _WEIGHTS_AT, self._at(column, block * LINE), WORD(4 * _INPUT))
                add_products(builder, register + block, _ROWS_AT, _WEIGHTS_AT)

    def _place(self, register: int, half: Any) -> Any:
        """Return where a register is stored, in one half of the memory for integers or the other."""
        return self._at(self._values.integers, self._builder.mul(half, WORD(4 * _SUMS)), register * _SUMS)

    def _leave(self, register: int, half: Any) -> None:
        store_tile(self._builder, register, self._place(register, half), WORD(LANES * 4))

    def _factors(self, pair: Any, count: int, low: bool) -> list[list[Any]]:
        """For each group of a pair and each block of outputs their scales and, if there are any, minimums."""
        first = self._at(self._values.first, self._builder.mul(pair, WORD(2)))
        return [
            [
                self._scales_at(self._at(start, self._values.further) if block else start, self._at(first, each))
                for start in (self._values.scales, self._values.minimums)[: 1 + low]
            ]
            for each in range(count)
            for block in range(2)
        ]

    def _add_rows(self, factors: list[list[Any]], tile: Any, pair: Any, half: Any, rows: range) -> None:
        """Add what was stored of some rows of a tile, scaled, to their sums; the groups one after the other."""
        builder, groups = self._builder, self._values.groups
        first = self._at(self._values.first, builder.mul(pair, WORD(2)))
        numbers = self._at(self._rows_of(tile), builder.mul(groups, self._group), builder.mul(first, WORD(4)))
        totals = self._at(self._values.totals, builder.mul(tile, WORD(2 * _SUMS)))
        with cgutils.for_range(builder, WORD(len(rows))) as loop:
            row = self._at(loop.index, rows.start)
            line, numbers = builder.mul(row, WORD(LANES * 4)), self._at(numbers, builder.mul(row, self._values.stride))

            def number(which: int, each: int) -> Any:
                address = self._at(numbers, builder.mul(groups, WORD(4 * which)), 4 * each)
                kind = ir.FloatType()
                return everywhere(builder, builder.load(builder.inttoptr(address, kind.as_pointer())), kind)

            def vector(address: Any, kind: ir.Type) -> Any:
                return builder.inttoptr(self._at(address, line), kind.as_pointer())

            places = [vector(self._at(totals, block * _SUMS), FLOATS) for block in range(2)]
            added = [builder.load(place, align=LINE) for place in places]
            for each in range(len(factors) // 2):
                unit = number(SCALE, each)
                values = number(VALUES, each) if len(factors[0]) > 1 else None
                for block in range(2):
                    scale, *minimum = factors[2 * each + block]
                    whole = builder.load(vector(self._place(2 * each + block, half), _INTS), align=LINE)
                    scaled = builder.fmul(builder.sitofp(whole, FLOATS), unit)
                    added[block] = self._fma(builder, scaled, scale, added[block])
                    for least in minimum:
                        added[block] = self._fma(builder, values, least, added[block])
            for place, total in zip(places, added, strict=True):
                builder.store(total, place, align=LINE)


def _single(scale: str) -> Any:
    """Return `single(groups)`: add to totals [2, ROWS, 16] what the first group gives for the first tile of rows."""

    @intrinsic
    def single(typing_context: Any, groups: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _GroupsCode(builder, scale, Groups(*cgutils.unpack_tuple(builder, args[0]))).single()
            return context.get_dummy_value()

        return types.void(groups), codegen

    return single


def _pairs(scale: str) -> Any:
    """Return `pairs(groups, count, tiles)`: so many pairs of groups from the first on, for so many tiles of rows."""

    @intrinsic
    def pairs(typing_context: Any, groups: Any, count: Any, tiles: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _GroupsCode(builder, scale, Groups(*cgutils.unpack_tuple(builder, args[0]))).pairs(*args[1:])
            return context.get_dummy_value()

        return types.void(groups, types.int64, types.int64), codegen

    return pairs


@inline
def memory_for(rows: int) -> int:
    """Return bytes that a block of work needs for so many rows."""
    return _TOTALS + (rows + ROWS - 1) // ROWS * 2 * _SUMS


@inline
def first_group(panel: int, panels: int, groups: int) -> int:
    """Return the first group of a panel; all panels but the last have pairs of groups."""
    return min(groups, first_unit(panel, panels, (groups + 1) // 2) * 2)


@jit
def ask_for(weight: int, further: int, nbytes: int) -> None:
    for at in range(0, nbytes, LINE):
        prefetch(weight + at)
        prefetch(weight + further + at)


def multiplier(scale: str, bits: int, offset: int, codebook: Codebook, put: Any) -> Any:
    """Return `multiply(job, block, behind, first, last, memory, following)`: the rows [first, last) of a job of
    `int4` times a block of outputs and the one `behind` blocks after it. Weights at `following` are needed next; it
    may be 0. Stored numbers are `offset` more than the integers, where there are no minimums or they have more than
    four bits. With a `codebook`, they are indices of such numbers.

    `put(job, block, first, count, sums, behind)` writes results.
    """
    single, pairs = _single(scale), _pairs(scale)
    unpack, unpack_signed = (unpacker(bits, less, codebook) for less in (offset if bits > 4 else 0, offset))

    @jit
    def multiply(job: Any, block: int, behind: int, first: int, last: int, memory: int, following: int) -> None:
        weight, scales = job.weight + block * job.block_bytes, job.scale + block * job.scale_bytes
        minimum = job.minimum + block * job.scale_bytes if job.minimum > 0 else 0
        further, further_scales = behind * job.block_bytes, behind * job.scale_bytes
        integers, unpacked, totals = memory + INTEGERS, memory + _WEIGHTS, memory + _TOTALS
        stride, groups = job.stride, job.groups
        group = job.width // groups
        depth = min(DEPTH, group)
        per, nbytes = group // depth, job.block_bytes // groups
        for line in range((last - first + ROWS - 1) // ROWS * ROWS * 2):
            store(totals, line * LANES, splat(ZERO))
        panels, blocks = (job.width + PANEL - 1) // PANEL, (last - first + ROWS - 1) // ROWS
        for panel in range(panels):
            start, stop = first_group(panel, panels, groups), first_group(panel + 1, panels, groups)
            here, inputs = weight + start * nbytes, (stop - start) * group
            if minimum > 0:
                unpack(here, unpacked, inputs)
                unpack(here + further, unpacked + LINE, inputs)
            else:
                unpack_signed(here, unpacked, inputs)
                unpack_signed(here + further, unpacked + LINE, inputs)
            ahead = weight + stop * nbytes if panel + 1 < panels else following
            if ahead > 0:
                ask_for(ahead, further, (stop - start) * nbytes)
            count, x = (stop - start) // 2, job.packed + first * stride
            if count > 0:
                part = Groups(
                    x, stride, start, groups, per, depth, unpacked, scales, minimum, further_scales, integers, totals
                )
                pairs(part, count, blocks)
            if start + 2 * count < stop:
                at = unpacked + 2 * count * group * _INPUT
                for tile in range(blocks):
                    here, sums = x + tile * ROWS * stride, totals + tile * 2 * _SUMS
                    rest = Groups(
                        here, stride, stop - 1, groups, per, depth, at, scales, minimum, further_scales, integers, sums
                    )
                    single(rest)
        for r in range(first, last, ROWS):
            sums, count = totals + (r - first) * 2 * LANES * 4, min(ROWS, last - r)
            put(job, block, r, count, sums, _SUMS)
            if job.ups == 0:
                put(job, block + behind, r, count, sums + _SUMS, 0)

    return multiply
