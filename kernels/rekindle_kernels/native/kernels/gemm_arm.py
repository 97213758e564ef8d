"""Tiles of many rows times a matrix on AArch64: 8 rows times 8 outputs in its registers of four lanes.

The rows lie in panels as in `gemm_panels`, the matrix is taken as it is stored. Sums of 8 outputs for two times four
rows are 16 registers, four words of each output 8 more: an instruction takes a word out of them by itself. So 64
instructions that multiply need 16 loads, and the matrix is neither turned nor spread; for `bfdot` LLVM spreads words by
instructions of their own, 32 of them. With `i8mm` an instruction multiplies two rows by two outputs, two words of each:
32 of them, for which words are brought together 16 times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rekindle_kernels.native.cpu import has_feature
from rekindle_kernels.native.language import arm
from rekindle_kernels.native.language.jit import jit
from rekindle_kernels.native.language.memory import WORD

OUTPUTS = 8
VECTORS = 2  # registers with a row in each lane
ROWS = VECTORS * arm.REGISTER
SUMS = OUTPUTS * VECTORS  # registers


def multiply_tile(panel: int, size: int) -> Any:
    """Return `tile(w, x, words, sums)`: 8 outputs whose words begin at w, times the first 8 rows of a panel of so
    many at x: sums [8, panel]. `words` is a multiple of four; numbers have `size` bytes."""
    by_matrices = size == 1 and has_feature("i8mm")
    add = _add_matrices if by_matrices else _adder(arm.dot if size == 1 else arm.dot_bf16)

    @intrinsic
    def tile(typing_context: Any, w: Any, x: Any, words: Any, sums: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            w, x, words, sums = args

            def register(start: Any, number: Any) -> Any:
                """Return the register whose first word is the one of that number."""
                address = builder.add(start, builder.mul(number, WORD(4)))
                return builder.inttoptr(address, arm.INTS.as_pointer())

            totals = [cgutils.alloca_once(builder, arm.INTS) for _ in range(SUMS)]
            for total in totals:
                builder.store(ir.Constant(arm.INTS, [0] * arm.REGISTER), total)
            with cgutils.for_range(builder, builder.udiv(words, WORD(arm.REGISTER))) as loop:
                first = builder.mul(loop.index, WORD(arm.REGISTER))
                columns = [
                    builder.load(register(w, builder.add(builder.mul(words, WORD(o)), first)), align=4)
                    for o in range(OUTPUTS)
                ]

                def rows(i: int) -> list[Any]:
                    """Word i of each row."""
                    start = builder.mul(builder.add(first, WORD(i)), WORD(panel))
                    starts = [builder.add(start, WORD(v * arm.REGISTER)) for v in range(VECTORS)]
                    return [builder.load(register(x, place), align=4) for place in starts]

                before = [builder.load(total) for total in totals]
                for total, value in zip(totals, add(builder, columns, rows, before), strict=True):
                    builder.store(value, total)
            found = [builder.load(total) for total in totals]
            for number, value in enumerate(_in_rows(builder, found) if by_matrices else found):
                place = WORD(number // VECTORS * panel + number % VECTORS * arm.REGISTER)
                builder.store(value, register(sums, place), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), codegen

    return tile


def _adder(dot: Any) -> Any:
    """Return a function that adds the products of four words by `dot`; sums are [outputs, vectors]."""

    def add(builder: Any, columns: list[Any], rows: Callable[[int], list[Any]], sums: list[Any]) -> list[Any]:
        for i in range(arm.REGISTER):
            vectors = rows(i)
            words = [arm.everywhere(builder, column, i) for column in columns]
            sums = [
                dot(builder, sums[o * VECTORS + v], vectors[v], words[o])
                for o in range(OUTPUTS)
                for v in range(VECTORS)
            ]
        return sums

    return add


def _add_matrices(builder: Any, columns: list[Any], rows: Callable[[int], list[Any]], sums: list[Any]) -> list[Any]:
    """Return the same by `multiply_matrices`; sums are [pairs of outputs, pairs of rows]."""
    for i in range(0, arm.REGISTER, 2):
        even, odd = rows(i), rows(i + 1)
        pairs = [
            arm.pick(builder, even[v], odd[v], lanes) for v in range(VECTORS) for lanes in ([0, 4, 1, 5], [2, 6, 3, 7])
        ]
        words = [arm.pick(builder, columns[o], columns[o + 1], [i, i + 1, i + 4, i + 5]) for o in range(0, OUTPUTS, 2)]
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
        for o in range(OUTPUTS)
        for v in range(VECTORS)
    ]


def tile_multiplier(panel: int, size: int) -> Any:
    """Return what `gemm_panels.tile_multiplier` returns, for panels of so many rows."""
    tile = multiply_tile(panel, size)

    @jit
    def multiply(w: int, x: int, words: int, sums: int, rows: int, first: bool) -> None:
        for o in range(0, 16, OUTPUTS):
            for r in range(0, min(rows, panel), ROWS):
                tile(w + o * words * 4, x + r * 4, words, sums + (o * panel + r) * 4)

    return multiply
