"""Instructions that multiply the two bfloat16 or four int8 in each lane of a vector, and loads for their operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from rekindle_kernels.native.cpu import on_arm
from rekindle_kernels.native.language import arm
from rekindle_kernels.native.language.jit import emits
from rekindle_kernels.native.language.memory import widen_bf16
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
    """a + b · c: each lane of a holds an int32, of b four bytes, and of c four int8. The bytes of b are unsigned if
    `unsigned()`. On x86 they may be halves of vectors.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _quads(builder, *args)

    return a(a, a, a), codegen


def _in_registers(builder: Any, add: Any, *args: Any) -> Any:
    return builder.bitcast(arm.in_parts(builder, add, *(builder.bitcast(x, _INTS) for x in args)), FLOATS)


def unsigned() -> bool:
    """True if the instruction that multiplies four int8 in a lane takes one factor's numbers as unsigned."""
    return not on_arm()


def _quads(builder: Any, *args: Any) -> Any:
    if on_arm():
        return _in_registers(builder, arm.dot, *args)
    lanes = args[0].type.count
    ints = ir.VectorType(ir.IntType(32), lanes)
    kind = ir.FunctionType(ints, [ints, ints, ints])
    function = get_or_insert_function(builder.module, kind, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}")
    return builder.bitcast(builder.call(function, [builder.bitcast(x, ints) for x in args]), args[0].type)


@emits(types.void, types.int64, types.int64, VECTOR)
def store_rounded(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Return `store_bf16` in one instruction, which on x86 flushes denormal numbers to zero, as `add_pairs` does."""
    narrowed = _narrowed(builder, value)
    pointer = builder.gep(builder.inttoptr(address, ir.IntType(16).as_pointer()), [index])
    builder.store(narrowed, builder.bitcast(pointer, narrowed.type.as_pointer()), align=1)


@emits(VECTOR, VECTOR)
def rounded(builder: Any, value: Any) -> Any:
    """Return numbers rounded to bfloat16, as float32; on x86 denormal ones become zero."""
    halves = ir.VectorType(ir.IntType(16), LANES)
    return widen_bf16(builder, builder.bitcast(_narrowed(builder, value), halves))


def _narrowed(builder: Any, value: Any) -> Any:
    narrow = ir.VectorType(BFloat(), LANES)
    if on_arm():
        return builder.fptrunc(value, narrow)
    return llvm_call("llvm.x86.avx512bf16.cvtneps2bf16.512", narrow, FLOATS)(builder, value)


@emits(VECTOR, VECTOR, VECTOR)
def times_power_of_two(builder: Any, a: Any, exponent: Any) -> Any:
    """a · 2^exponent for any integers, however far below the range of numbers."""
    mask, rounding = ir.IntType(16), ir.IntType(32)
    emit = llvm_call("llvm.x86.avx512.mask.scalef.ps.512", FLOATS, FLOATS, FLOATS, FLOATS, mask, rounding)
    all_lanes, as_ever = ir.Constant(mask, -1), ir.Constant(rounding, 4)
    return emit(builder, a, exponent, a, all_lanes, as_ever)


# 2^x on [0, 1) as 1 + x · (…), with 2 at 1, highest power first: to one part in 9,000, and to half of a float32's last
# place.
_ROUGH = (0.07826796067994811, 0.22630769399179373, 0.6954243453282581, 1.0)
_EXACT = (
    0.00021715022550660077, 0.0012440877770141124, 0.009678063818684616, 0.055484152492264, 0.2402295132862653,
    0.6931470324002653, 1.0,
)  # fmt: skip


def _power(coefficients: Sequence[float]) -> Any:
    """Return an operation: 2 to the power of a vector, in fewer instructions than AVX2 has for it."""

    @emits(VECTOR, VECTOR)
    def power(builder: Any, x: Any) -> Any:
        mask, integer = ir.IntType(16), ir.IntType(32)
        all_lanes, as_ever, below = ir.Constant(mask, -1), ir.Constant(integer, 4), ir.Constant(integer, 1)
        reduced = llvm_call("llvm.x86.avx512.mask.reduce.ps.512", FLOATS, FLOATS, integer, FLOATS, mask, integer)
        fma = llvm_call(f"llvm.fma.v{LANES}f32", FLOATS, FLOATS, FLOATS, FLOATS)
        scale = llvm_call("llvm.x86.avx512.mask.scalef.ps.512", FLOATS, FLOATS, FLOATS, FLOATS, mask, integer)
        rest = reduced(builder, x, below, x, all_lanes, as_ever)  # x less the integer below it, which `scale` takes
        curve, *others = (ir.Constant(FLOATS, [number] * LANES) for number in coefficients)
        for number in others:
            curve = fma(builder, curve, rest, number)
        return scale(builder, curve, x, curve, all_lanes, as_ever)

    return power


# Both are 1 at 0, and 0 however far below the range of numbers. `rough_power` is for weights of eight bits.
power_of_floats, rough_power = _power(_EXACT), _power(_ROUGH)


@emits(VECTOR, VECTOR, VECTOR)
def join_rounded(builder: Any, a: Any, b: Any) -> Any:
    """Return words of two numbers rounded to bfloat16: `a` is in the low half. Ties are rounded up."""
    half = ir.Constant(_INTS, [0x8000] * LANES)
    low, high = (builder.add(builder.bitcast(x, _INTS), half) for x in (a, b))
    low = builder.lshr(low, ir.Constant(_INTS, [16] * LANES))
    high = builder.and_(high, ir.Constant(_INTS, [-65536] * LANES))
    return builder.bitcast(builder.or_(low, high), FLOATS)


@emits(VECTOR, types.int64, types.int64, types.int64)
def load_interleaved(builder: Any, a: Any, b: Any, index: Any) -> Any:
    """Return sixteen two-byte elements of each of two rows, with a's elements in the low halves of the words."""

    def halves(address: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(address, ir.IntType(16).as_pointer()), [index])
        stored = ir.VectorType(ir.IntType(16), LANES).as_pointer()
        return builder.zext(builder.load(builder.bitcast(pointer, stored), align=1), _INTS)

    high = builder.shl(halves(b), ir.Constant(_INTS, [16] * LANES))
    return builder.bitcast(builder.or_(halves(a), high), FLOATS)


@emits(types.UniTuple(VECTOR, 2), types.int64, types.int64, types.int64)
def load_two_interleaved(builder: Any, a: Any, b: Any, index: Any) -> list[Any]:
    """Return `load_interleaved(a, b, index)` and the same for the next sixteen elements, in half the time."""

    def elements(address: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(address, ir.IntType(16).as_pointer()), [index])
        stored = ir.VectorType(ir.IntType(16), 2 * LANES).as_pointer()
        return builder.load(builder.bitcast(pointer, stored), align=1)

    x, y = elements(a), elements(b)
    order = [[lane for i in range(LANES) for lane in (half + i, 2 * LANES + half + i)] for half in (0, LANES)]
    lanes = ir.VectorType(ir.IntType(32), 2 * LANES)
    return [builder.bitcast(builder.shuffle_vector(x, y, ir.Constant(lanes, one)), FLOATS) for one in order]


@emits(types.int64, VECTOR)
def total_of_ints(builder: Any, a: Any) -> Any:
    kind = ir.FunctionType(ir.IntType(32), [_INTS])
    function = get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.add.v{LANES}i32")
    return builder.sext(builder.call(function, [builder.bitcast(a, _INTS)]), ir.IntType(64))


def _byte_writer(offset: int) -> Any:
    @emits(types.void, types.int64, types.int64, VECTOR)
    def write(builder: Any, address: Any, index: Any, value: Any) -> None:
        narrow = ir.VectorType(ir.IntType(8), LANES)
        integers = builder.add(builder.fptosi(value, _INTS), ir.Constant(_INTS, [offset] * LANES))
        pointer = builder.gep(builder.inttoptr(address, ir.IntType(8).as_pointer()), [index])
        builder.store(builder.trunc(integers, narrow), builder.bitcast(pointer, narrow.as_pointer()), align=1)

    return write


store_i8 = _byte_writer(0)  # of integers, as sixteen bytes
store_u8 = _byte_writer(128)  # of integers, plus 128


@emits(types.void, types.int64, types.int64, VECTOR, VECTOR, VECTOR, VECTOR)
def store_columns(builder: Any, address: Any, stride: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    """Return the lanes of four vectors as sixteen rows of four float32, `stride` floats apart."""

    def pick(x: Any, y: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))

    low = [lane for g in range(0, LANES, 4) for lane in (g, LANES + g, g + 1, LANES + g + 1)]
    high = [lane + 2 for lane in low]
    ab, ab2, cd, cd2 = pick(a, b, low), pick(a, b, high), pick(c, d, low), pick(c, d, high)
    first = [lane for g in range(0, LANES, 4) for lane in (g, g + 1, LANES + g, LANES + g + 1)]
    second = [lane + 2 for lane in first]
    rows = [pick(ab, cd, first), pick(ab, cd, second), pick(ab2, cd2, first), pick(ab2, cd2, second)]
    four = ir.VectorType(ir.FloatType(), 4)
    start = builder.inttoptr(address, ir.FloatType().as_pointer())
    for row in range(LANES):
        vector = rows[row % 4]
        part = builder.shuffle_vector(
            vector, vector, ir.Constant(ir.VectorType(ir.IntType(32), 4), [row // 4 * 4 + i for i in range(4)])
        )
        pointer = builder.gep(start, [builder.mul(stride, ir.Constant(ir.IntType(64), row))])
        builder.store(part, builder.bitcast(pointer, four.as_pointer()), align=4)


@emits(VECTOR, VECTOR, VECTOR)
def add_ints(builder: Any, a: Any, b: Any) -> Any:
    """a plus the four int8 in each lane of b, as int32."""
    return _quads(builder, a, ir.Constant(_INTS, [0x01010101] * LANES), b)


@emits(VECTOR, VECTOR, VECTOR)
def from_ints(builder: Any, a: Any, b: Any) -> Any:
    """Return the integers in a minus 128 times those in b, as float32."""
    offset = builder.mul(builder.bitcast(b, _INTS), ir.Constant(_INTS, [128] * LANES))
    return builder.sitofp(builder.sub(builder.bitcast(a, _INTS), offset), FLOATS)


@emits(VECTOR, VECTOR)
def to_floats(builder: Any, a: Any) -> Any:
    """Return the integers in a, as float32."""
    return builder.sitofp(builder.bitcast(a, _INTS), FLOATS)


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


@emits(types.void, types.int64, types.int64, types.int64, types.int64)
def transpose(builder: Any, source: Any, width: Any, target: Any, height: Any) -> None:
    """Sixteen by sixteen words: rows `width` words apart become columns of rows `height` words apart."""

    def at(start: Any, stride: Any, row: int) -> Any:
        first = builder.inttoptr(start, ir.FloatType().as_pointer())
        pointer = builder.gep(first, [builder.mul(stride, ir.Constant(ir.IntType(64), row))])
        return builder.bitcast(pointer, FLOATS.as_pointer())

    rows = exchanged(builder, [builder.load(at(source, width, row), align=4) for row in range(LANES)])
    for row in range(LANES):
        builder.store(rows[row], at(target, height, row), align=4)
