"""Tiles of many rows times an int8 matrix on AArch64: 8 rows times 8 outputs in its registers of four lanes.

The rows lie in panels as in `gemm_panels`, the matrix is taken as it is stored. Sums of 8 outputs for two times four
rows are 16 registers, four words of each output 8 more: an instruction takes a word out of them by itself. So 64
instructions that multiply need 16 loads, and the matrix is neither turned nor spread.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rekindle_kernels.native.language import arm
from rekindle_kernels.native.language.jit import jit
from rekindle_kernels.native.language.memory import WORD

OUTPUTS = 8
VECTORS = 2  # registers with a row in each lane
ROWS = VECTORS * arm.REGISTER


def multiply_tile(panel: int) -> Any:
    """`tile(w, x, words, sums)`: 8 outputs whose words begin at w, times the first 8 rows of a panel of so many at x:
    sums [8, panel]. `words` is a multiple of four."""

    @intrinsic
    def tile(typing_context: Any, w: Any, x: Any, words: Any, sums: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            w, x, words, sums = args

            def register(start: Any, number: Any) -> Any:
                """The register whose first word is the one of that number."""
                address = builder.add(start, builder.mul(number, WORD(4)))
                return builder.inttoptr(address, arm.INTS.as_pointer())

            totals = [[cgutils.alloca_once(builder, arm.INTS) for _ in range(VECTORS)] for _ in range(OUTPUTS)]
            for output in totals:
                for total in output:
                    builder.store(ir.Constant(arm.INTS, [0] * arm.REGISTER), total)
            with cgutils.for_range(builder, builder.udiv(words, WORD(arm.REGISTER))) as loop:
                first = builder.mul(loop.index, WORD(arm.REGISTER))
                columns = [
                    builder.load(register(w, builder.add(builder.mul(words, WORD(o)), first)), align=4)
                    for o in range(OUTPUTS)
                ]
                for i in range(arm.REGISTER):
                    start = builder.mul(builder.add(first, WORD(i)), WORD(panel))
                    rows = [
                        builder.load(register(x, builder.add(start, WORD(v * arm.REGISTER))), align=4)
                        for v in range(VECTORS)
                    ]
                    for column, output in zip(columns, totals, strict=True):
                        word = arm.everywhere(builder, column, i)
                        for row, total in zip(rows, output, strict=True):
                            builder.store(arm.dot(builder, builder.load(total), row, word), total)
            for o, output in enumerate(totals):
                for v, total in enumerate(output):
                    builder.store(builder.load(total), register(sums, WORD(o * panel + v * arm.REGISTER)), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), codegen

    return tile


def tiles(panel: int, vector: int) -> Any:
    """What `gemm_panels.tiles` gives, for panels of so many rows and vectors of so many."""
    tile = multiply_tile(panel)

    @jit
    def one_of_group(w: int, x: int, words: int, sums: int) -> None:
        for r in range(0, panel, ROWS):
            tile(w, x + r * 4, words, sums + r * 4)

    @jit
    def one_vector(w: int, x: int, words: int, sums: int) -> None:
        for o in range(0, 16, OUTPUTS):
            for r in range(0, vector, ROWS):
                tile(w + o * words * 4, x + r * 4, words, sums + (o * panel + r) * 4)

    return one_of_group, one_of_group, one_vector
