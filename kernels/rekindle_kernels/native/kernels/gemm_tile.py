"""A tile of a product in registers: a few rows times a few vectors of columns, over all words of both."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rekindle_kernels.native.language.memory import WORD
from rekindle_kernels.native.language.vector import LANES

_INTS = ir.VectorType(ir.IntType(32), LANES)
_INSTRUCTION = {1: "vpdpbusd", 2: "vdpbf16ps"}  # total += products of what is in the words of both, by their size


def multiply_tile(rows: int, vectors: int, size: int) -> Any:
    """`tile(columns, x, words, sums)`: rows of words that follow each other at x, times columns of words.

    Columns [words, vectors · 16] lie at a multiple of 64 bytes, sums [rows, vectors · 16] anywhere. Numbers have `size`
    bytes; x holds unsigned ones if it is 1.
    """
    assert rows % 3 == 0, "an address reaches three rows"

    @intrinsic
    def tile(typing_context: Any, columns: Any, x: Any, words: Any, sums: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            columns, x, words, sums = args

            def vector(start: Any, number: Any) -> Any:
                return builder.gep(builder.inttoptr(start, _INTS.as_pointer()), [number])

            totals = [cgutils.alloca_once(builder, _INTS) for _ in range(rows * vectors)]
            for total in totals:
                builder.store(ir.Constant(_INTS, [0] * LANES), total)
            row_size = builder.mul(words, WORD(4))
            thirds = [builder.add(x, builder.mul(row_size, WORD(row))) for row in range(0, rows, 3)]
            with cgutils.for_range(builder, words) as loop:
                first = builder.mul(loop.index, WORD(vectors))
                loaded = [builder.load(vector(columns, builder.add(first, WORD(v))), align=64) for v in range(vectors)]
                for row in range(rows):
                    here = totals[row * vectors : (row + 1) * vectors]
                    word = builder.add(thirds[row // 3], builder.mul(loop.index, WORD(4)))
                    before = [builder.load(total) for total in here]
                    for total, value in zip(
                        here, _add_row(builder, size, word, row_size, row % 3, loaded, before), strict=True
                    ):
                        builder.store(value, total)
            for number, total in enumerate(totals):
                builder.store(builder.load(total), vector(sums, WORD(number)), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), codegen

    return tile


def _add_row(
    builder: Any, size: int, word: Any, row_size: Any, row: int, columns: list[Any], sums: list[Any]
) -> list[Any]:
    """`sums` and the word `row` rows behind `word` times each of the columns.

    As assembly: the compiler would ask for the words of all rows first, and have no registers left for the sums.
    """
    count = len(sums)
    behind = ("", f",${2 * count + 2}", f",${2 * count + 2},2")[row]
    lines = [f"vpbroadcastd (${2 * count + 1}{behind}), ${count}"]
    lines += [f"{_INSTRUCTION[size]} ${count + 1 + i}, ${count}, ${i}" for i in range(count)]
    registers = ["=v"] * count + ["=&v"] + ["v"] * count + ["r", "r"] + [str(i) for i in range(count)]
    results = ir.LiteralStructType([_INTS] * (count + 1))
    kind = ir.FunctionType(results, [_INTS] * count + [WORD, WORD] + [_INTS] * count)
    operands = [*columns, word, row_size, *sums]
    added = builder.asm(kind, "\n".join(lines), ",".join(registers), operands, side_effect=False)
    return [builder.extract_value(added, i) for i in range(count)]
