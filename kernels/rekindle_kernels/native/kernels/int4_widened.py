"""Many rows times a matrix in groups by AMX, both of them as bfloat16.

A group of 32 inputs fills half of a tile that takes 64 of eight bits, one of 16 a quarter, and what it adds up to has
to be scaled before the next, which takes longer than the product (`int4_amx`). With many rows it is faster to scale the
weights: a panel of 32 outputs is widened to bfloat16, multiplied by all rows while it is in the first cache, and summed
in float32 over all groups. Groups of 128 fill two tiles and are better left alone.

Rows are rounded to bfloat16, to 8 bits of each number, where `int4_amx` rounds them to 8 bits of a group's largest;
weights are rounded to 8 bits too. So results are as near to those of the values, but not the same as of fewer rows: a
caller that needs that does without.

GFLOP/s of two cores of a Xeon for three products of each layer of the 360M model, or of Qwen3-0.6B (K types), the
least of 10 to 25 in turn:

    rows                                   32     48     64    128    512
    groups of 32         int8            1137   1191   1154   1308   1323
                         bfloat16        1144   1356   1540   1977   2206
    groups of 64         int8                   1607   1545   1671   1884
                         bfloat16               1341   1548   1773   1988
    groups of 128        int8                          2084   2270   2203
                         bfloat16                      1527   1870   1944
    Q4_K                 int8            1011   1045   1123          1052
                         bfloat16        1162   1295   1636          1988
    Q6_K                 int8             614    593    613           691
                         bfloat16         764    869   1000          1846
    Q8_0                 int8             869    907    901          1153
                         bfloat16         803    988   1109          1841

A tile of rows is 16 rows of 32 inputs, one of weights 16 pairs of inputs of 16 outputs; either is a kilobyte.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from rekindle_kernels.int4_format import INPUTS_OF
from rekindle_kernels.native.kernels.int4_amx import ask_for
from rekindle_kernels.native.kernels.int4_tile import TILE_BYTES, Codebook, scale_reader, stored_integers
from rekindle_kernels.native.language.amx import (
    MEMORY,
    add_products_of_pairs,
    load_tile,
    store_tile,
    stream_tile,
    zero_tile,
)
from rekindle_kernels.native.language.jit import emits, inline, jit
from rekindle_kernels.native.language.memory import LINE, WORD
from rekindle_kernels.native.language.vector import FLOATS, LANES, llvm_call, load_f32, store_bf16

ROWS = 16  # of a tile
DEPTH = 32  # inputs of a tile
# Weights are widened for this many inputs at a time, so that they stay in the first cache. It is a multiple of 16, 32
# and 64, the groups that this kernel takes; `is_faster` leaves larger ones to the other kernel.
PANEL = 576
CACHED = 1 << 21  # bytes of rows that are multiplied together: they stay in the second cache
_TILE = ROWS * LINE  # bytes of a tile of rows, of weights, and of sums
_ROWS_AT, _WEIGHTS_AT = 4, 6  # registers; those before have the sums
_WEIGHTS = MEMORY
_TOTALS = _WEIGHTS + PANEL // DEPTH * 2 * _TILE
_INTS = ir.VectorType(ir.IntType(32), LANES)
_BASE, _BASE_BITS, _UNIT = 256, 0x43800000, 15  # a float to which integers below 256 are added in its bits, and where


@inline
def is_faster(rows: int, group: int) -> bool:
    """True if so many rows are multiplied faster by a matrix with groups of so many inputs than by `int4_amx`."""
    return rows >= 48 if group <= 32 else group == 64 and rows >= 96


@inline
def memory_for(rows: int) -> int:
    """Return bytes that a block of work needs for so many rows."""
    return _TOTALS + (rows + 2 * ROWS - 1) // (2 * ROWS) * 4 * _TILE


@inline
def store_row(x: int, packed: int, r: int, width: int) -> None:
    """Store row r, read from x, into its tiles."""
    out = packed + (r // ROWS * ROWS * width * 2) + r % ROWS * LINE
    for k in range(0, width, LANES):
        store_bf16(out + k // DEPTH * _TILE, k % DEPTH, load_f32(x, k))


def _widener(scale: str, bits: int, offset: int, codebook: Codebook, step: int) -> Any:
    """Return `widen(weights, scales, minimums, first, count, steps, target)`: so many groups of a block of outputs,
    from the group `first` on, as tiles at `target`, the tiles of another block between them.

    A group has `steps` times `step` tiles of what is stored; `minimums` may be 0.
    """

    @emits(types.void, *[types.int64] * 7)
    def widen(
        builder: Any, weights: Any, scales: Any, minimums: Any, first: Any, count: Any, steps: Any, target: Any
    ) -> None:
        fma = llvm_call(f"llvm.fma.v{LANES}f32", FLOATS, FLOATS, FLOATS, FLOATS)
        scales_at = scale_reader(builder, scale, builder.mul(steps, WORD(step * INPUTS_OF[bits])))

        def constant(number: int) -> Any:
            return ir.Constant(_INTS, [number] * LANES)

        def value(integers: Any, byte: int, factor: Any, least: Any) -> Any:
            """Return the bits of the values of one byte of each lane, rounded to nearest at the sixteenth."""
            left = _UNIT - 8 * byte
            moved = builder.shl(integers, constant(left)) if left > 0 else builder.lshr(integers, constant(-left))
            placed = builder.or_(builder.and_(moved, constant(0xFF << _UNIT)), constant(_BASE_BITS))
            number = fma(builder, builder.bitcast(placed, FLOATS), factor, least)
            return builder.add(builder.bitcast(number, _INTS), constant(0x8000))

        there = builder.icmp_signed("!=", minimums, WORD(0))
        least_at = cgutils.alloca_once(builder, FLOATS)
        per = builder.mul(steps, WORD(step))  # tiles of a group
        below = [ir.Constant(FLOATS, [-float(_BASE + each)] * LANES) for each in (offset, offset if bits > 4 else 0)]
        with cgutils.for_range(builder, count) as outer:
            group = builder.add(first, outer.index)
            factor = scales_at(scales, group)
            builder.store(builder.fmul(factor, below[0]), least_at, align=LINE)
            with builder.if_then(there):
                builder.store(fma(builder, factor, below[1], scales_at(minimums, group)), least_at, align=LINE)
            least = builder.load(least_at, align=LINE)
            with cgutils.for_range(builder, per) as inner:
                stored = builder.add(builder.mul(group, per), inner.index)
                address = builder.add(weights, builder.mul(stored, WORD(TILE_BYTES[bits])))
                tile = builder.add(builder.mul(outer.index, per), inner.index)
                begin = builder.mul(tile, WORD(INPUTS_OF[bits]))
                out = builder.add(
                    builder.mul(builder.udiv(begin, WORD(DEPTH)), WORD(2 * _TILE)),
                    builder.mul(builder.urem(begin, WORD(DEPTH)), WORD(LINE // 2)),
                )
                out = builder.add(target, out)
                for four, integers in enumerate(stored_integers(builder, bits, address, codebook)):
                    for pair in range(2):
                        even, odd = (value(integers, 2 * pair + byte, factor, least) for byte in range(2))
                        both = builder.or_(builder.lshr(even, constant(16)), builder.and_(odd, constant(0xFFFF0000)))
                        place = builder.add(out, WORD((2 * four + pair) * LINE))
                        builder.store(both, builder.inttoptr(place, _INTS.as_pointer()), align=LINE)

    return widen


def _multiplier_of(strips: int) -> Any:
    """Return `multiply(x, strip, weights, count, sums, fresh)`: `count` tiles of one or two strips of 16 rows, `strip`
    bytes apart, times the tiles of two blocks of outputs. The products are added to the sums [2, strips of 2, 16, 16],
    which start at zero if `fresh`.
    """
    sums_at = [(2 * block + v, block, v) for block in range(2) for v in range(strips)]

    @emits(types.void, *[types.int64] * 6)
    def multiply(builder: Any, x: Any, strip: Any, weights: Any, count: Any, sums: Any, fresh: Any) -> None:
        line = WORD(LINE)
        places = {register: builder.add(sums, WORD(register * _TILE)) for register, _, _ in sums_at}
        with builder.if_else(builder.icmp_signed("!=", fresh, WORD(0))) as (new, old):
            with new:
                for register in places:
                    zero_tile(builder, register)
            with old:
                for register, place in places.items():
                    load_tile(builder, register, place, line)
        rows = [x, builder.add(x, strip)][:strips]
        with cgutils.for_range(builder, count) as loop:
            at = builder.mul(loop.index, WORD(_TILE))
            column = builder.add(weights, builder.mul(loop.index, WORD(2 * _TILE)))
            for v, start in enumerate(rows):
                stream_tile(builder, _ROWS_AT + v, builder.add(start, at), line)
            for block in range(2):
                load_tile(builder, _WEIGHTS_AT + block, builder.add(column, WORD(block * _TILE)), line)
                for v in range(strips):
                    add_products_of_pairs(builder, 2 * block + v, _ROWS_AT + v, _WEIGHTS_AT + block)
        for register, place in places.items():
            store_tile(builder, register, place, line)

    return multiply


def multiplier(scale: str, bits: int, offset: int, codebook: Codebook, put: Any, step: int) -> Any:
    """Return `multiply(job, block, behind, first, last, memory, following)`: as `int4_amx.multiplier` makes, for
    rows that `store_row` packed. `behind` may be 0, for a block alone."""
    widen = _widener(scale, bits, offset, codebook, step)
    one, two = _multiplier_of(1), _multiplier_of(2)

    @jit
    def multiply(job: Any, block: int, behind: int, first: int, last: int, memory: int, following: int) -> None:
        weight, scales = job.weight + block * job.block_bytes, job.scale + block * job.scale_bytes
        minimum = job.minimum + block * job.scale_bytes if job.minimum > 0 else 0
        further, further_scales = behind * job.block_bytes, behind * job.scale_bytes
        further_minimum = minimum + further_scales if minimum > 0 else 0
        panel, totals, groups = memory + _WEIGHTS, memory + _TOTALS, job.groups
        group, nbytes, strip = job.width // groups, job.block_bytes // groups, ROWS * job.stride
        panels, strips = (job.width + PANEL - 1) // PANEL, (last - first + 2 * ROWS - 1) // (2 * ROWS)
        per = ((groups + panels - 1) // panels * group + DEPTH - 1) // DEPTH * DEPTH // group  # groups of a panel
        start = 0
        while start < groups:
            stop = min(groups, start + per)
            widen(weight, scales, minimum, start, stop - start, job.steps, panel)
            widen(
                weight + further, scales + further_scales, further_minimum, start, stop - start, job.steps,
                panel + _TILE,
            )  # fmt: skip
            ahead = weight + stop * nbytes if stop < groups else following
            # Each strip of rows asks for its share: memory is read while they are multiplied.
            share = ((stop - start) * nbytes // strips + LINE) // LINE * LINE if ahead > 0 else 0
            count, fresh = (stop - start) * group // DEPTH, 1 if start == 0 else 0
            x, sums = job.packed + first * job.stride + start * group * ROWS * 2, totals
            for r in range(first, last, 2 * ROWS):
                ask_for(ahead, further, share)
                ahead += share
                if r + ROWS < last:
                    two(x, strip, panel, count, sums, fresh)
                else:
                    one(x, strip, panel, count, sums, fresh)
                if stop == groups:
                    results = min(2 * ROWS, last - r)
                    put(job, block, r, results, sums, 2 * _TILE)
                    if job.ups == 0 and behind > 0:
                        put(job, block + behind, r, results, sums + 2 * _TILE, 0)
                x += 2 * strip
                sums += 4 * _TILE
            start = stop

    return multiply
