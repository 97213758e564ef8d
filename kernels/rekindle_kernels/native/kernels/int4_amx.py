"""Many rows times a 4-bit matrix by AMX: tiles of 16 rows, two blocks of 16 outputs and three groups of inputs.

A tile register holds 16 rows of 64 bytes. One instruction adds to 16 x 16 integers the products of 16 rows and 16
outputs over 64 inputs; rows are taken as they were packed, weights as `int4_tile.unpack` leaves them. What a group adds
up to is exact, and it is scaled and added to earlier groups as in `int4_tile`, rounding in the same places. So results
are the same to the last bit as without AMX, and a caller may choose either by what is faster.

Instructions are written as bytes, and code for any processor with AVX-512 holds them. They run where the caller says
that the processor has them and the system, asked by `allowed`, lets this process use them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rekindle_kernels.native.kernels.int4_tile import (
    SCALE,
    UNPACKED,
    VALUES,
    everywhere,
    scale_reader,
    unpacker,
)
from rekindle_kernels.native.language.handler import first_unit
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import LINE, WORD, prefetch, set_word
from rekindle_kernels.native.language.vector import FLOATS, LANES, llvm_call, splat, store

ROWS = 16  # of a tile
PANEL = 1024  # inputs whose weights are unpacked at a time: two blocks of outputs then lie in the first cache
DEPTH = 64  # inputs of a tile, or those of a group if it has fewer
GROUPS = 3  # whose sums, for two blocks of outputs, are in six of the eight registers
_ROWS_AT, _WEIGHTS_AT = 6, 7  # the other two
_INPUT = UNPACKED // 8  # bytes of an unpacked input of two blocks
_SUMS = ROWS * LANES * 4  # bytes of the sums of one block
ZERO = np.float32(0)

# Memory of a block of work: the shapes of the tile registers, those of before, integers as they leave the registers,
# unpacked weights, and the sums of all rows.
_BEFORE = LINE
INTEGERS = 2 * LINE
_WEIGHTS = INTEGERS + 2 * GROUPS * _SUMS
_TOTALS = _WEIGHTS + (PANEL + 128) * _INPUT


# -- instructions: the operands of prefixes are none, 66, F3 and F2

_NONE, _66, _F3, _F2 = range(4)


def _bytes(prefix: int, opcode: int, operands: int, *more: int, third: int = 0) -> str:
    code = [0xC4, 0xE2, (~third & 15) << 3 | prefix, opcode, operands, *more]
    return ".byte " + ", ".join(map(hex, code))


def _emit(builder: Any, code: str, *addresses: Any) -> None:
    """An instruction, with its addresses in rax and rcx."""
    kind = ir.FunctionType(ir.VoidType(), [WORD] * len(addresses))
    registers = ["{rax}", "{rcx}"][: len(addresses)]
    builder.asm(kind, code, ",".join([*registers, "~{memory}"]), addresses, side_effect=True)


def _zero(builder: Any, tile: int) -> None:
    _emit(builder, _bytes(_F2, 0x49, 0xC0 | tile << 3))


def _load(builder: Any, tile: int, address: Any, stride: Any) -> None:
    _emit(builder, _bytes(_F2, 0x4B, 0x04 | tile << 3, 0x08), address, stride)


def _store(builder: Any, tile: int, address: Any, stride: Any) -> None:
    _emit(builder, _bytes(_F3, 0x4B, 0x04 | tile << 3, 0x08), address, stride)


def _add_products(builder: Any, sums: int, rows: int, weights: int) -> None:
    """Products of signed bytes."""
    _emit(builder, _bytes(_F2, 0x5E, 0xC0 | sums << 3 | rows, third=weights))


def _on_address(code: str) -> Any:
    @intrinsic
    def instruction(typing_context: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _emit(builder, code, args[0])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return instruction


_configure, _configuration = _on_address(_bytes(_NONE, 0x49, 0x00)), _on_address(_bytes(_66, 0x49, 0x00))


@intrinsic
def allowed(typing_context: Any) -> Any:
    """1 if this process may use tile registers, which Linux allows a process that asks for it; else 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arch_prctl, ask, tile_data = WORD(158), WORD(0x1023), WORD(18)
        kind = ir.FunctionType(WORD, [WORD] * 3)
        registers = "={rax},0,{rdi},{rsi},~{rcx},~{r11},~{memory},~{flags}"
        answer = builder.asm(kind, "syscall", registers, [arch_prctl, ask, tile_data], side_effect=True)
        return builder.zext(builder.icmp_signed("==", answer, WORD(0)), WORD)

    return types.int64(), codegen


# -- a tile


def _tile(count: int, scale: str) -> Any:
    """`tile(x, stride, first, groups, per, depth, weights, scales, minimums, further, integers, totals)`: adds to
    totals [2, ROWS, 16] what `count` groups from `first` on give.

    `per` tiles of `depth` inputs make a group. Unpacked weights of the first of these groups begin at `weights`; other
    operands are those of `int4_tile.multiply_tile`.
    """
    ints = ir.VectorType(ir.IntType(32), LANES)

    @intrinsic
    def tile(
        typing_context: Any,
        x: Any,
        stride: Any,
        first: Any,
        groups: Any,
        per: Any,
        depth: Any,
        weights: Any,
        scales: Any,
        minimums: Any,
        further: Any,
        integers: Any,
        totals: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, stride, first, groups, per, depth, weights, scales, minimums, further, integers, totals = args
            fma = llvm_call(f"llvm.fma.v{LANES}f32", FLOATS, FLOATS, FLOATS, FLOATS)
            group = builder.mul(per, depth)  # inputs
            scales_at = scale_reader(builder, scale, group)

            def at(start: Any, *steps: Any) -> Any:
                for step in steps:
                    start = builder.add(start, step if isinstance(step, ir.Value) else WORD(step))
                return start

            def vector(address: Any, kind: ir.Type = FLOATS) -> Any:
                return builder.load(builder.inttoptr(address, kind.as_pointer()), align=2)

            def factors(start: Any, each: int, block: int) -> Any:
                return scales_at(at(start, further) if block else start, at(first, each))

            for each in range(count):
                for block in range(2):
                    _zero(builder, 2 * each + block)
                begin = builder.mul(group, WORD(each))
                with cgutils.for_range(builder, per) as loop:
                    inside = at(begin, builder.mul(loop.index, depth))
                    _load(builder, _ROWS_AT, at(x, builder.mul(first, group), inside), stride)
                    column = at(weights, builder.mul(inside, WORD(_INPUT)))
                    for block in range(2):
                        _load(builder, _WEIGHTS_AT, at(column, block * LINE), WORD(4 * _INPUT))
                        _add_products(builder, 2 * each + block, _ROWS_AT, _WEIGHTS_AT)
            for number in range(2 * count):
                _store(builder, number, at(integers, number * _SUMS), WORD(LANES * 4))

            numbers = at(x, builder.mul(groups, group), builder.mul(first, WORD(4)))

            def add_groups(minimums: Any) -> None:
                high = [[factors(scales, each, block) for block in range(2)] for each in range(count)]
                low = [[factors(minimums, each, b) for b in range(2)] for each in range(count if minimums else 0)]
                with cgutils.for_range(builder, WORD(ROWS)) as loop:
                    line = builder.mul(loop.index, WORD(LANES * 4))
                    row = at(numbers, builder.mul(loop.index, stride))

                    def number(which: int, each: int) -> Any:
                        address = at(row, builder.mul(groups, WORD(4 * which)), 4 * each)
                        kind = ir.FloatType()
                        return everywhere(builder, builder.load(builder.inttoptr(address, kind.as_pointer())), kind)

                    places = [
                        builder.inttoptr(at(totals, block * _SUMS, line), FLOATS.as_pointer()) for block in range(2)
                    ]
                    added = [builder.load(place, align=4) for place in places]
                    for each in range(count):
                        unit = number(SCALE, each)
                        values = number(VALUES, each) if low else None
                        for block in range(2):
                            whole = vector(at(integers, (2 * each + block) * _SUMS, line), ints)
                            scaled = builder.fmul(builder.sitofp(whole, FLOATS), unit)
                            added[block] = fma(builder, scaled, high[each][block], added[block])
                            if low:
                                added[block] = fma(builder, values, low[each][block], added[block])
                    for place, total in zip(places, added, strict=True):
                        builder.store(total, place, align=4)

            with builder.if_else(builder.icmp_signed("!=", minimums, WORD(0))) as (with_minimums, without):
                with with_minimums:
                    add_groups(minimums)
                with without:
                    add_groups(None)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 12), codegen

    return tile


# -- a block of work


@inline
def memory_for(rows: int) -> int:
    """Bytes that a block of work needs for so many rows."""
    return _TOTALS + (rows + ROWS - 1) // ROWS * 2 * _SUMS


@jit
def begin(memory: int, group: int) -> None:
    """Shape the tile registers for groups of so many inputs; `memory` keeps how they were."""
    depth = min(DEPTH, group)
    for index in range(8):
        set_word(memory, index, 0)
    set_word(memory, 0, 1)
    line = 64 + (64 << 16)  # the bytes of a row in two registers
    set_word(memory, 2, line + (line << 32))
    set_word(memory, 3, line + (depth << 32) + (64 << 48))
    set_word(memory, 6, 0x10101010101010 + ((depth // 4) << 56))
    _configuration(memory + _BEFORE)
    _configure(memory)


@jit
def end(memory: int) -> None:
    """Leave the tile registers as they were."""
    _configure(memory + _BEFORE)


@jit
def ask_for(weight: int, further: int, nbytes: int) -> None:
    for at in range(0, nbytes, LINE):
        prefetch(weight + at)
        prefetch(weight + further + at)


def multiplier(scale: str, bits: int, offset: int, put: Any) -> Any:
    """`multiply(job, block, behind, first, last, memory, following)`: the rows [first, last) of a job of `int4` times a
    block of outputs and the one so many blocks behind it. Weights at `following` are needed next; it may be 0. What is
    stored is `offset` more than the integers, where there are no minimums or it has eight bits.

    `put(job, block, first, count, sums, behind)` writes results.
    """
    one, two, three = (_tile(count, scale) for count in range(1, GROUPS + 1))
    unpack, unpack_signed = unpacker(bits, offset if bits == 8 else 0), unpacker(bits, offset)

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
        panels = (job.width + PANEL - 1) // PANEL
        for panel in range(panels):
            start, stop = first_unit(panel, panels, groups), first_unit(panel + 1, panels, groups)
            here, tiles = weight + start * nbytes, (stop - start) * group // 8
            if minimum > 0:
                unpack(here, unpacked, tiles)
                unpack(here + further, unpacked + LINE, tiles)
            else:
                unpack_signed(here, unpacked, tiles)
                unpack_signed(here + further, unpacked + LINE, tiles)
            ahead = weight + stop * nbytes if panel + 1 < panels else following
            for r in range(first, last, ROWS):
                x, sums = job.packed + r * stride, totals + (r - first) * 2 * LANES * 4
                g = start
                while g < stop:
                    count, at = min(GROUPS, stop - g), unpacked + (g - start) * group * _INPUT
                    if r == first and ahead > 0:  # little by little, while others are multiplied
                        ask_for(ahead + (g - start) * nbytes, further, count * nbytes)
                    if count == 3:
                        three(x, stride, g, groups, per, depth, at, scales, minimum, further_scales, integers, sums)
                    elif count == 2:
                        two(x, stride, g, groups, per, depth, at, scales, minimum, further_scales, integers, sums)
                    else:
                        one(x, stride, g, groups, per, depth, at, scales, minimum, further_scales, integers, sums)
                    g += count
        for r in range(first, last, ROWS):
            sums, count = totals + (r - first) * 2 * LANES * 4, min(ROWS, last - r)
            put(job, block, r, count, sums, _SUMS)
            if job.ups == 0:
                put(job, block + behind, r, count, sums + _SUMS, 0)

    return multiply
