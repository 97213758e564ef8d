"""Instructions that multiply the two bfloat16 or four int8 that each lane of a vector holds, and what feeds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from rekindle_kernels.native.cpu import on_arm
from rekindle_kernels.native.language import arm
from rekindle_kernels.native.language.vector import FLOATS, LANES, VECTOR, BFloat, llvm_call

_INTS = ir.VectorType(ir.IntType(32), LANES)


@intrinsic
def add_pairs(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a + b · c, where b and c hold two bfloat16 in each lane. On x86 they may be halves of vectors."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if on_arm():
            return _in_registers(builder, arm.dot_bf16, *args)
        pairs = ir.VectorType(BFloat(), 2 * a.lanes)
        emit = llvm_call(f"llvm.x86.avx512bf16.dpbf16ps.{32 * a.lanes}", a.stored, a.stored, pairs, pairs)
        return emit(builder, args[0], builder.bitcast(args[1], pairs), builder.bitcast(args[2], pairs))

    return a(a, a, a), codegen


@intrinsic
def add_quads(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a + b · c, where a lane of a holds an int32, of b four bytes, and of c four int8. Those of b are unsigned if
    `unsigned()`. On x86 they may be halves of vectors."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _quads(builder, *args)

    return a(a, a, a), codegen


def _in_registers(builder: Any, add: Any, *args: Any) -> Any:
    return builder.bitcast(arm.in_parts(builder, add, *(builder.bitcast(x, _INTS) for x in args)), FLOATS)


def unsigned() -> bool:
    """True if the instruction that multiplies four int8 in a lane takes those of one factor as unsigned."""
    return not on_arm()


def _quads(builder: Any, *args: Any) -> Any:
    if on_arm():
        return _in_registers(builder, arm.dot, *args)
    lanes = args[0].type.count
    ints = ir.VectorType(ir.IntType(32), lanes)
    kind = ir.FunctionType(ints, [ints, ints, ints])
    function = get_or_insert_function(builder.module, kind, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}")
    return builder.bitcast(builder.call(function, [builder.bitcast(x, ints) for x in args]), args[0].type)


@intrinsic
def store_rounded(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
    """Return `store_bf16` in one instruction, which on x86 flushes denormal numbers to zero, as `add_pairs` does."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        narrow = ir.VectorType(BFloat(), LANES)
        if on_arm():
            rounded = builder.fptrunc(args[2], narrow)
        else:
            rounded = llvm_call("llvm.x86.avx512bf16.cvtneps2bf16.512", narrow, FLOATS)(builder, args[2])
        pointer = builder.gep(builder.inttoptr(args[0], ir.IntType(16).as_pointer()), [args[1]])
        builder.store(rounded, builder.bitcast(pointer, narrow.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, VECTOR), codegen


@intrinsic
def times_power_of_two(typing_context: Any, a: Any, exponent: Any) -> Any:
    """a · 2^exponent for any integers, however far below the range of numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        mask, rounding = ir.IntType(16), ir.IntType(32)
        emit = llvm_call("llvm.x86.avx512.mask.scalef.ps.512", FLOATS, FLOATS, FLOATS, FLOATS, mask, rounding)
        all_lanes, as_ever = ir.Constant(mask, -1), ir.Constant(rounding, 4)
        return emit(builder, args[0], args[1], args[0], all_lanes, as_ever)

    return VECTOR(VECTOR, VECTOR), codegen


@intrinsic
def load_interleaved(typing_context: Any, a: Any, b: Any, index: Any) -> Any:
    """Sixteen elements of two bytes of each of two rows: those of a in the low halves of the words."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def halves(address: Any) -> Any:
            pointer = builder.gep(builder.inttoptr(address, ir.IntType(16).as_pointer()), [args[2]])
            stored = ir.VectorType(ir.IntType(16), LANES).as_pointer()
            return builder.zext(builder.load(builder.bitcast(pointer, stored), align=1), _INTS)

        high = builder.shl(halves(args[1]), ir.Constant(_INTS, [16] * LANES))
        return builder.bitcast(builder.or_(halves(args[0]), high), FLOATS)

    return VECTOR(types.int64, types.int64, types.int64), codegen


@intrinsic
def load_two_interleaved(typing_context: Any, a: Any, b: Any, index: Any) -> Any:
    """Return `load_interleaved(a, b, index)` and that of the sixteen elements behind, which takes half as long."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def elements(address: Any) -> Any:
            pointer = builder.gep(builder.inttoptr(address, ir.IntType(16).as_pointer()), [args[2]])
            stored = ir.VectorType(ir.IntType(16), 2 * LANES).as_pointer()
            return builder.load(builder.bitcast(pointer, stored), align=1)

        x, y = elements(args[0]), elements(args[1])
        order = [[lane for i in range(LANES) for lane in (half + i, 2 * LANES + half + i)] for half in (0, LANES)]
        lanes = ir.VectorType(ir.IntType(32), 2 * LANES)
        both = [builder.bitcast(builder.shuffle_vector(x, y, ir.Constant(lanes, one)), FLOATS) for one in order]
        return context.make_tuple(builder, signature.return_type, both)

    return types.UniTuple(VECTOR, 2)(types.int64, types.int64, types.int64), codegen


@intrinsic
def total_of_ints(typing_context: Any, a: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [_INTS])
        function = get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.add.v{LANES}i32")
        return builder.sext(builder.call(function, [builder.bitcast(args[0], _INTS)]), ir.IntType(64))

    return types.int64(VECTOR), codegen


def _byte_writer(offset: int) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        narrow = ir.VectorType(ir.IntType(8), LANES)
        integers = builder.add(builder.fptosi(args[2], _INTS), ir.Constant(_INTS, [offset] * LANES))
        pointer = builder.gep(builder.inttoptr(args[0], ir.IntType(8).as_pointer()), [args[1]])
        builder.store(builder.trunc(integers, narrow), builder.bitcast(pointer, narrow.as_pointer()), align=1)
        return context.get_dummy_value()

    signature = types.void(types.int64, types.int64, VECTOR)
    return intrinsic(lambda typing_context, address, index, value: (signature, codegen))


store_i8 = _byte_writer(0)  # of integers, as sixteen bytes
store_u8 = _byte_writer(128)  # of integers, plus 128


@intrinsic
def store_columns(typing_context: Any, address: Any, stride: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return the lanes of four vectors as sixteen rows of four float32, `stride` floats apart."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def pick(x: Any, y: Any, lanes: list[int]) -> Any:
            return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))

        low = [lane for g in range(0, LANES, 4) for lane in (g, LANES + g, g + 1, LANES + g + 1)]
        high = [lane + 2 for lane in low]
        ab, ab2, cd, cd2 = (
            pick(args[2], args[3], low),
            pick(args[2], args[3], high),
            pick(args[4], args[5], low),
            pick(args[4], args[5], high),
        )
        first = [lane for g in range(0, LANES, 4) for lane in (g, g + 1, LANES + g, LANES + g + 1)]
        second = [lane + 2 for lane in first]
        rows = [pick(ab, cd, first), pick(ab, cd, second), pick(ab2, cd2, first), pick(ab2, cd2, second)]
        four = ir.VectorType(ir.FloatType(), 4)
        start = builder.inttoptr(args[0], ir.FloatType().as_pointer())
        for row in range(LANES):
            vector = rows[row % 4]
            part = builder.shuffle_vector(
                vector, vector, ir.Constant(ir.VectorType(ir.IntType(32), 4), [row // 4 * 4 + i for i in range(4)])
            )
            pointer = builder.gep(start, [builder.mul(args[1], ir.Constant(ir.IntType(64), row))])
            builder.store(part, builder.bitcast(pointer, four.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, VECTOR, VECTOR, VECTOR, VECTOR), codegen


@intrinsic
def add_ints(typing_context: Any, a: Any, b: Any) -> Any:
    """a plus the four int8 in each lane of b, as int32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _quads(builder, args[0], ir.Constant(_INTS, [0x01010101] * LANES), args[1])

    return VECTOR(VECTOR, VECTOR), codegen


@intrinsic
def from_ints(typing_context: Any, a: Any, b: Any) -> Any:
    """Return the integers in a minus 128 times those in b, as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        offset = builder.mul(builder.bitcast(args[1], _INTS), ir.Constant(_INTS, [128] * LANES))
        return builder.sitofp(builder.sub(builder.bitcast(args[0], _INTS), offset), FLOATS)

    return VECTOR(VECTOR, VECTOR), codegen


@intrinsic
def to_floats(typing_context: Any, a: Any) -> Any:
    """Return the integers in a, as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(builder.bitcast(args[0], _INTS), FLOATS)

    return VECTOR(VECTOR), codegen


def exchanged(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Return vectors of a column each for as many of a row."""
    rows, count, step = list(rows), len(rows), 1

    def pick(x: Any, y: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), count), lanes))

    while step < count:  # the places of bit `step` in a row's number and a lane's number are exchanged
        low = [lane if not lane & step else count + lane - step for lane in range(count)]
        high = [lane + step if not lane & step else count + lane for lane in range(count)]
        for row in range(count):
            if not row & step:
                x, y = rows[row], rows[row + step]
                rows[row], rows[row + step] = pick(x, y, low), pick(x, y, high)
        step *= 2
    return rows


@intrinsic
def transpose(typing_context: Any, source: Any, width: Any, target: Any, height: Any) -> Any:
    """Sixteen by sixteen words: rows `width` words apart become columns of rows `height` words apart."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def at(start: Any, stride: Any, row: int) -> Any:
            first = builder.inttoptr(start, ir.FloatType().as_pointer())
            pointer = builder.gep(first, [builder.mul(stride, ir.Constant(ir.IntType(64), row))])
            return builder.bitcast(pointer, FLOATS.as_pointer())

        rows = exchanged(builder, [builder.load(at(args[0], args[1], row), align=4) for row in range(LANES)])
        for row in range(LANES):
            builder.store(rows[row], at(args[2], args[3], row), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen
