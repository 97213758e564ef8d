"""Registers of eight lanes on x86: what turns a matrix, and adds products to what sixteen of them hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core.cgutils import get_or_insert_function

from rekindle_kernels.native.language.memory import WORD

REGISTER = 8  # lanes
INTS = ir.VectorType(ir.IntType(32), REGISTER)
SHORTS = ir.VectorType(ir.IntType(16), 2 * REGISTER)
# They add to the sum {0} the products of the column {1} and the word that {2} has everywhere; {3} may be overwritten.
FLOATS_ADD = ("vfmadd231ps {1}, {2}, {0}",)
PAIRS_ADD = ("vpmaddwd {1}, {2}, {3}", "vpaddd {3}, {0}, {0}")
QUADS_ADD = ("{{vex}} vpdpbusd {1}, {2}, {0}",)


def transposed(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Eight registers of a row each as eight of a column."""

    def pick(a: Any, b: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(INTS, lanes))

    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    pairs = [pick(rows[i], rows[i + 1], lanes) for i in range(0, 8, 2) for lanes in (low, high)]
    first, second = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    fours = [pick(pairs[i], pairs[i + 2], lanes) for i in (0, 1, 4, 5) for lanes in (first, second)]
    left, right = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    return [pick(fours[i], fours[i + 4], lanes) for lanes in (left, right) for i in range(4)]


def add_row(
    builder: Any, instructions: Sequence[str], word: Any, row_size: Any, row: int, columns: list[Any], sums: list[Any]
) -> list[Any]:
    """Return `sums` and the word `row` rows behind `word`, of rows 0 to 2, times each of the columns.

    As assembly: the compiler would ask for the words of all rows first, and have no registers left for the sums.
    """
    count, kind = len(sums), columns[0].type
    behind = ("", f",${2 * count + 3}", f",${2 * count + 3},2")[row]
    spread, spare = f"${count}", f"${count + 1}"
    lines = [f"vbroadcastss (${2 * count + 2}{behind}), {spread}"]
    for i in range(count):
        last = i == count - 1  # needs the word no more
        lines += [each.format(f"${i}", f"${count + 2 + i}", spread, spread if last else spare) for each in instructions]
    registers = ["=x"] * count + ["=&x"] * 2 + ["x"] * count + ["r", "r"] + [str(i) for i in range(count)]
    results = ir.LiteralStructType([kind] * (count + 2))
    function = ir.FunctionType(results, [kind] * count + [WORD, WORD] + [kind] * count)
    operands = [*columns, word, row_size, *sums]
    added = builder.asm(function, "\n".join(lines), ",".join(registers), operands, side_effect=False)
    return [builder.extract_value(added, i) for i in range(count)]


def bf16_in_two(builder: Any, words: Any) -> tuple[Any, Any]:
    """Return the low and the high bfloat16 of each word, as float32."""
    return builder.shl(words, _all(16)), builder.and_(words, _all(0xFFFF0000))


def bytes_in_two(builder: Any, words: Any) -> tuple[Any, Any]:
    """Return the first and third of four int8 in each word, and the others, as two of 16 bits."""
    shorts, eight = builder.bitcast(words, SHORTS), ir.Constant(SHORTS, [8] * 2 * REGISTER)
    even = builder.ashr(builder.shl(shorts, eight), eight)
    return builder.bitcast(even, INTS), builder.bitcast(builder.ashr(shorts, eight), INTS)


def add_bytes(builder: Any, a: Any, words: Any) -> Any:
    """a plus the four int8 in each lane of `words`, by AVX-VNNI."""
    kind = ir.FunctionType(INTS, [INTS, INTS, INTS])
    function = get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.256")
    return builder.call(function, [a, _all(0x01010101), words])


def _all(number: int) -> Any:
    return ir.Constant(INTS, [number] * REGISTER)
