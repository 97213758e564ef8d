"""Registers of x86, of eight lanes (AVX2) or sixteen (AVX-512): what turns a matrix, and adds products to sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core.cgutils import get_or_insert_function

from rekindle_kernels.native.language.dot_products import exchanged
from rekindle_kernels.native.language.memory import WORD

# They add to the sum {0} the products of the column {1} and the word at {4} that {2} has everywhere; {3} may be
# overwritten.
FLOATS_ADD = ("vfmadd231ps {1}, {2}, {0}",)
SPREAD_FLOATS_ADD = ("vfmadd231ps {4}{{1to16}}, {1}, {0}",)  # of AVX-512
PAIRS_ADD = ("vpmaddwd {1}, {2}, {3}", "vpaddd {3}, {0}, {0}")
QUADS_ADD = ("{{vex}} vpdpbusd {1}, {2}, {0}",)


def ints(lanes: int) -> Any:
    """Return the type of a register of words."""
    return ir.VectorType(ir.IntType(32), lanes)


def transposed(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Return registers of a column each for as many of a row."""
    if len(rows) > 8:
        return exchanged(builder, rows)

    def pick(a: Any, b: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(ints(8), lanes))

    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    pairs = [pick(rows[i], rows[i + 1], lanes) for i in range(0, 8, 2) for lanes in (low, high)]
    first, second = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    fours = [pick(pairs[i], pairs[i + 2], lanes) for i in (0, 1, 4, 5) for lanes in (first, second)]
    left, right = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    return [pick(fours[i], fours[i + 4], lanes) for lanes in (left, right) for i in range(4)]


def add_row(
    builder: Any, instructions: Sequence[str], word: Any, step: Any, row: int, columns: list[Any], sums: list[Any]
) -> list[Any]:
    """Return `sums` and the word `row` steps behind `word` times each of the columns. A step is a number of bytes, or,
    for up to two, a register.

    As assembly: the compiler would ask for the words of all rows first, and have no registers left for the sums.
    """
    count, kind = len(sums), columns[0].type
    spread, spare = f"${count}", f"${count + 1}"
    steps = [] if isinstance(step, int) else [step]
    behind = ("", f",${2 * count + 3}", f",${2 * count + 3},2")[row] if steps else ""
    place = f"{'' if steps else row * step}(${2 * count + 2}{behind})"
    lines = [f"vbroadcastss {place}, {spread}"] if instructions != SPREAD_FLOATS_ADD else []
    for i in range(count):
        overwritten = spread if i == count - 1 else spare  # the last needs the word no more
        sums_and_columns = f"${i}", f"${count + 2 + i}"
        lines += [each.format(*sums_and_columns, spread, overwritten, place) for each in instructions]
    registers = ["=v"] * count + ["=&v"] * 2 + ["v"] * count + ["r"] * (1 + len(steps)) + [str(i) for i in range(count)]
    results = ir.LiteralStructType([kind] * (count + 2))
    function = ir.FunctionType(results, [kind] * count + [WORD] * (1 + len(steps)) + [kind] * count)
    operands = [*columns, word, *steps, *sums]
    added = builder.asm(function, "\n".join(lines), ",".join(registers), operands, side_effect=False)
    return [builder.extract_value(added, i) for i in range(count)]


def bf16_in_two(builder: Any, words: Any) -> tuple[Any, Any]:
    """Return the low and the high bfloat16 of each word, as float32."""
    return builder.shl(words, _all(words, 16)), builder.and_(words, _all(words, 0xFFFF0000))


def bytes_in_two(builder: Any, words: Any) -> tuple[Any, Any]:
    """Return the first and third of four int8 in each word, and the others, as two of 16 bits."""
    shorts = builder.bitcast(words, ir.VectorType(ir.IntType(16), 2 * words.type.count))
    eight = _all(shorts, 8)
    even = builder.ashr(builder.shl(shorts, eight), eight)
    return builder.bitcast(even, words.type), builder.bitcast(builder.ashr(shorts, eight), words.type)


def add_bytes(builder: Any, a: Any, words: Any) -> Any:
    """Return a plus the four int8 in each of eight lanes of `words`, by AVX-VNNI."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    function = get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.256")
    return builder.call(function, [a, _all(words, 0x01010101), words])


def _all(vector: Any, number: int) -> Any:
    return ir.Constant(vector.type, [number] * vector.type.count)
