"""Instructions of AArch64 that add products to what a register holds; a vector is four of its registers.

Those of integers are exact, so kernels give what they give on x86. Registers are passed as words, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core.cgutils import get_or_insert_function

from rekindle_kernels.native.language.vector import LANES, BFloat

PARTS = 4  # registers of a vector
REGISTER = LANES // PARTS  # lanes
INTS = ir.VectorType(ir.IntType(32), REGISTER)
BYTES = ir.VectorType(ir.IntType(8), 4 * REGISTER)
FLOATS = ir.VectorType(ir.FloatType(), REGISTER)
_SHORTS = ir.VectorType(ir.IntType(16), 2 * REGISTER)


def dot(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a + b · c in a register: one instruction of `dotprod`. If c is one word in all lanes, it is taken from there."""
    function = _function(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", INTS, INTS, BYTES, BYTES)
    return builder.call(function, [a, builder.bitcast(b, BYTES), builder.bitcast(c, BYTES)])


def dot_bf16(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return the same of two bfloat16 in a word, a being float32: one instruction of `bf16`."""
    pairs = ir.VectorType(BFloat(), 2 * REGISTER)
    function = _function(builder, "llvm.aarch64.neon.bfdot.v4f32.v8bf16", FLOATS, FLOATS, pairs, pairs)
    result = builder.call(function, [builder.bitcast(a, FLOATS), builder.bitcast(b, pairs), builder.bitcast(c, pairs)])
    return builder.bitcast(result, INTS)


def multiply_matrices(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a + two rows of eight int8 in b times two columns in c, each row with each column: one instruction of `i8mm`."""
    function = _function(builder, "llvm.aarch64.neon.smmla.v4i32.v16i8", INTS, INTS, BYTES, BYTES)
    return builder.call(function, [a, builder.bitcast(b, BYTES), builder.bitcast(c, BYTES)])


def widened_dot(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a + b · c in a register, by four instructions that every AArch64 has. Two products have to fit into 16 bits
    together: one of the factors must not be -128."""
    x, y = builder.bitcast(b, BYTES), builder.bitcast(c, BYTES)
    pairwise = _function(builder, "llvm.aarch64.neon.addp.v8i16", _SHORTS, _SHORTS, _SHORTS)
    long = _function(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", INTS, _SHORTS)
    products = []
    for start in (0, 2 * REGISTER):
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), 2 * REGISTER), list(range(start, start + 2 * REGISTER)))
        halves = (builder.sext(builder.shuffle_vector(each, each, lanes), _SHORTS) for each in (x, y))
        products.append(builder.mul(*halves))
    return builder.add(a, builder.call(long, [builder.call(pairwise, products)]))


def look_up(builder: Any, indices: Any, table: Any) -> Any:
    """Return the bytes of a table [16] at the indices in a register's bytes."""
    return builder.call(_function(builder, "llvm.aarch64.neon.tbl1.v16i8", BYTES, BYTES, BYTES), [table, indices])


def in_parts(builder: Any, add: Callable[[Any, Any, Any, Any], Any], a: Any, b: Any, c: Any) -> Any:
    """Return `add` of three vectors, register by register."""
    parts = []
    for start in range(0, LANES, REGISTER):
        lanes = ir.Constant(INTS, list(range(start, start + REGISTER)))
        parts.append(add(builder, *(builder.shuffle_vector(each, each, lanes) for each in (a, b, c))))
    low, high = (_joined(builder, *parts[i : i + 2]) for i in (0, 2))
    return _joined(builder, low, high)


def everywhere(builder: Any, register: Any, lane: int) -> Any:
    """One lane of a register in all of them."""
    return pick(builder, register, register, [lane] * REGISTER)


def pick(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Return the chosen lanes of two registers; lane numbers of the second continue after the first's."""
    return builder.shuffle_vector(a, b, ir.Constant(INTS, lanes))


def _joined(builder: Any, low: Any, high: Any) -> Any:
    count = 2 * low.type.count
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(count))))


def _function(builder: Any, name: str, result: ir.Type, *operands: ir.Type) -> Any:
    return get_or_insert_function(builder.module, ir.FunctionType(result, operands), name)
