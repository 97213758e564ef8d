"""Sixteen float32, or eight, as numba types: where the compiler would not keep sums in registers by itself."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from rekindle_kernels.native.language.jit import emits
from rekindle_kernels.native.language.memory import WORD, bf16, f16, f32, i8, widen_bf16

LANES, HALF_LANES = 16, 8
FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)


class Vector(types.Type):
    """The type of a numba variable that holds so many float32."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"float32x{lanes}")

    @property
    def stored(self) -> ir.VectorType:
        """LLVM's type of it."""
        return ir.VectorType(ir.FloatType(), self.lanes)


VECTOR, HALF_VECTOR = Vector(LANES), Vector(HALF_LANES)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, numba_type.stored)


def _loader(element: ir.Type, widen: Any, vector: Vector = VECTOR) -> Any:
    @emits(vector, types.int64, types.int64)
    def load(builder: Any, address: Any, index: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(address, element.as_pointer()), [index])
        stored = ir.VectorType(element, vector.lanes)
        return widen(builder, builder.load(builder.bitcast(pointer, stored.as_pointer()), align=1))

    return load


load_f32 = _loader(ir.FloatType(), lambda builder, x: x)
load_half = _loader(ir.FloatType(), lambda builder, x: x, HALF_VECTOR)
load_bf16 = _loader(ir.IntType(16), widen_bf16)
load_f16 = _loader(ir.HalfType(), lambda builder, x: builder.fpext(x, FLOATS))
load_i8 = _loader(ir.IntType(8), lambda builder, x: builder.sitofp(x, FLOATS))


@intrinsic
def store(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
    """Store a vector, or half of one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(args[0], ir.FloatType().as_pointer()), [args[1]])
        builder.store(args[2], builder.bitcast(pointer, value.stored.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, value), codegen


@emits(types.void, types.int64, types.int64, VECTOR, VECTOR, VECTOR, VECTOR)
def store_four(builder: Any, address: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    """Store four vectors, one after the other."""
    pointer = builder.gep(builder.inttoptr(address, ir.FloatType().as_pointer()), [index])
    first = builder.bitcast(pointer, FLOATS.as_pointer())
    for number, value in enumerate((a, b, c, d)):
        builder.store(value, builder.gep(first, [ir.Constant(ir.IntType(32), number)]), align=1)


def _splatter(vector: Vector) -> Any:
    @emits(vector, types.float32)
    def splat(builder: Any, value: Any) -> Any:
        """Return the same number in every lane."""
        nothing = ir.Constant(vector.stored, ir.Undefined)
        one = builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), vector.lanes), [0] * vector.lanes)
        return builder.shuffle_vector(one, nothing, lanes)

    return splat


splat, splat_half = _splatter(VECTOR), _splatter(HALF_VECTOR)


@emits(VECTOR, VECTOR)
def in_register(builder: Any, value: Any) -> Any:
    """Return the same vector, kept in a register of x86: where a vector and its lower half hold one number, the
    compiler would otherwise spread that number twice."""
    return builder.asm(ir.FunctionType(FLOATS, [FLOATS]), "", "=v,0", [value], side_effect=False)


@emits(HALF_VECTOR, VECTOR)
def lower_half(builder: Any, value: Any) -> Any:
    """Return the first eight lanes."""
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), HALF_LANES), list(range(HALF_LANES)))
    return builder.shuffle_vector(value, ir.Constant(FLOATS, ir.Undefined), lanes)


def _operation(arguments: int, emit: Any) -> Any:
    """Return an operation from vectors to a vector."""
    return emits(VECTOR, *[VECTOR] * arguments)(emit)


def llvm_call(name: str, result: ir.Type, *operands: ir.Type) -> Any:
    """Return a call of LLVM's own function `name`."""

    def emit(builder: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, operands)
        return builder.call(get_or_insert_function(builder.module, kind, name), args, fastmath=("reassoc", "nnan"))

    return emit


def _folder(step: int) -> Any:
    """Return an operation that folds two vectors into one: the sums of lanes `step` apart. Lanes with the bit `step` in
    their number get the sums of the second vector.
    """
    low = [LANES + lane - step if lane & step else lane for lane in range(LANES)]
    high = [LANES + lane if lane & step else lane + step for lane in range(LANES)]

    def emit(builder: Any, a: Any, b: Any) -> Any:
        first, second = (builder.shuffle_vector(a, b, ir.Constant(_WORDS, lanes)) for lanes in (low, high))
        return builder.fadd(first, second)

    return _operation(2, emit)


def _power_of_two(builder: Any, exponent: Any) -> Any:
    integers = ir.VectorType(ir.IntType(32), LANES)
    biased = builder.add(builder.fptosi(exponent, integers), ir.Constant(integers, [127] * LANES))
    return builder.bitcast(builder.shl(biased, ir.Constant(integers, [23] * LANES)), FLOATS)


def _to_22_bits(builder: Any, x: Any) -> Any:
    one, bits = ir.Constant(_WORDS, [1] * LANES), builder.bitcast(x, _WORDS)
    odd = builder.and_(builder.lshr(bits, one), one)
    rounded = builder.and_(builder.add(bits, odd), ir.Constant(_WORDS, [0xFFFFFFFE] * LANES))
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.select(is_nan, x, builder.bitcast(rounded, FLOATS))


def _larger_magnitude(builder: Any, a: Any, x: Any) -> Any:
    bits = builder.and_(builder.bitcast(x, _WORDS), ir.Constant(_WORDS, [0x7FFFFFFF] * LANES))
    before = builder.bitcast(a, _WORDS)
    return builder.bitcast(builder.select(builder.icmp_signed(">", bits, before), bits, before), FLOATS)


multiply_add = _operation(3, llvm_call(f"llvm.fma.v{LANES}f32", FLOATS, FLOATS, FLOATS, FLOATS))  # a · b + c
multiply = _operation(2, lambda builder, a, b: builder.fmul(a, b))
add = _operation(2, lambda builder, a, b: builder.fadd(a, b))
# The second of two that can't be compared: with a bound as the first, NaN stays NaN.
larger = _operation(2, lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
smaller = _operation(2, lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))
nearest = _operation(1, llvm_call(f"llvm.rint.v{LANES}f32", FLOATS, FLOATS))  # integers, as float32
subtract = _operation(2, lambda builder, a, b: builder.fsub(a, b))
divide = _operation(2, lambda builder, a, b: builder.fdiv(a, b))
to_22_bits = _operation(1, _to_22_bits)  # as `jax.lax.reduce_precision(x, 8, 22)`
# a or |x|, for a >= 0. Magnitudes sort like integers, NaN above all others: compared as numbers it would be lost.
larger_magnitude = _operation(2, _larger_magnitude)
magnitude = _operation(1, llvm_call(f"llvm.fabs.v{LANES}f32", FLOATS, FLOATS))
with_sign_of = _operation(2, llvm_call(f"llvm.copysign.v{LANES}f32", FLOATS, FLOATS, FLOATS))  # |a| with b's sign
where_negative = _operation(  # a where x < 0, b elsewhere
    3, lambda builder, x, a, b: builder.select(builder.fcmp_ordered("<", x, ir.Constant(FLOATS, [0.0] * LANES)), a, b)
)
# Sixteen vectors folded by 1, 2, 4 and 8 are one: lane i has the total of the i-th.
fold_1, fold_2, fold_4, fold_8 = (_folder(step) for step in (1, 2, 4, 8))
power_of_two = _operation(1, _power_of_two)  # of an integer from -126 to 127


@emits(types.float32, VECTOR)
def total(builder: Any, value: Any) -> Any:
    """Return the sum of all lanes."""
    emit = llvm_call(f"llvm.vector.reduce.fadd.v{LANES}f32", ir.FloatType(), ir.FloatType(), FLOATS)
    return emit(builder, ir.Constant(ir.FloatType(), 0.0), value)


@emits(types.float32, VECTOR)
def largest(builder: Any, value: Any) -> Any:
    """Return the largest of all lanes."""
    return llvm_call(f"llvm.vector.reduce.fmax.v{LANES}f32", ir.FloatType(), FLOATS)(builder, value)


@emits(types.float32, VECTOR)
def largest_magnitude(builder: Any, value: Any) -> Any:
    """Return the largest lane of a vector without negative numbers; NaN if any lane is NaN."""
    kind = ir.FunctionType(_WORDS.element, [_WORDS])
    reduce = get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.smax.v{LANES}i32")
    found = builder.call(reduce, [builder.bitcast(value, _WORDS)])
    nan = ir.Constant(_WORDS.element, 0x7FC00000)  # the same for all: callers may add to the bits
    return builder.bitcast(builder.select(builder.icmp_signed("<", found, nan), found, nan), ir.FloatType())


@emits(VECTOR, VECTOR, types.int64, types.int64, types.float32)
def between(builder: Any, value: Any, low: Any, high: Any, otherwise: Any) -> Any:
    """Return the lanes [low, high) of a vector, and another number in the others."""
    lanes = ir.VectorType(WORD, LANES)
    number = ir.Constant(lanes, list(range(LANES)))
    first = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)

    def everywhere(x: Any, kind: ir.VectorType) -> Any:
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), first)

    above = builder.icmp_signed(">=", number, everywhere(low, lanes))
    below = builder.icmp_signed("<", number, everywhere(high, lanes))
    return builder.select(builder.and_(above, below), value, everywhere(otherwise, FLOATS))


@emits(types.void, types.int64, types.int64, VECTOR)
def store_bf16(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Rounded to the nearest bfloat16, ties to even."""
    wide, narrow = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.IntType(16), LANES)

    def constant(kind: ir.VectorType, number: int) -> Any:
        return ir.Constant(kind, [number] * LANES)

    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, constant(wide, 16)), constant(wide, 1))
    rounded = builder.add(builder.add(bits, constant(wide, 0x7FFF)), odd)
    stored = builder.trunc(builder.lshr(rounded, constant(wide, 16)), narrow)
    is_nan = builder.fcmp_unordered("uno", value, value)
    pointer = builder.gep(builder.inttoptr(address, ir.IntType(16).as_pointer()), [index])
    stored = builder.select(is_nan, constant(narrow, 0x7FC0), stored)
    builder.store(stored, builder.bitcast(pointer, narrow.as_pointer()), align=1)


@emits(VECTOR, types.int64, types.int64, types.int64)
def load_distances(builder: Any, address: Any, index: Any, origin: Any) -> Any:
    """Return how far sixteen int32 are above an integer, as float32."""
    pointer = builder.gep(builder.inttoptr(address, ir.IntType(32).as_pointer()), [index])
    stored = builder.load(builder.bitcast(pointer, _WORDS.as_pointer()), align=4)
    one = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), builder.trunc(origin, ir.IntType(32)), WORD(0))
    everywhere = builder.shuffle_vector(one, ir.Constant(_WORDS, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))
    return builder.sitofp(builder.sub(stored, everywhere), FLOATS)


@emits(VECTOR, types.int64, VECTOR, VECTOR)
def where_bits(builder: Any, bits: Any, value: Any, otherwise: Any) -> Any:
    """Return the lanes of `value` where a bit is 1, and the lanes of `otherwise` elsewhere; the lowest bit is for the
    first lane.
    """
    lanes = builder.bitcast(builder.trunc(bits, ir.IntType(LANES)), ir.VectorType(ir.IntType(1), LANES))
    return builder.select(lanes, value, otherwise)


class BFloat(ir.Type):
    """LLVM's type of a bfloat16, which llvmlite has no type for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


class Storage(NamedTuple):
    """How weights and pages are stored: what reads one element, and what reads sixteen.

    Both functions take an address and an index of elements, and widen to float32.
    """

    read: Any
    load: Any
    size: int  # bytes; 0: two are a byte


def four_bits(head_dim: int) -> Storage:
    """Return the storage of four-bit vectors, as `rekindle_kernels.packed_pages` lays them out.

    An index counts elements of one vector. Code c is widened to 2·c - 15.
    """
    half, byte = head_dim // 2, ir.IntType(8)

    def widened(builder: Any, address: Any, index: Any, lanes: int) -> Any:
        many = ir.VectorType(ir.IntType(32), lanes)
        above = builder.icmp_signed(">=", index, WORD(half))
        place = builder.sub(index, builder.select(above, WORD(half), WORD(0)))
        pointer = builder.gep(builder.inttoptr(address, byte.as_pointer()), [place])
        stored = builder.load(builder.bitcast(pointer, ir.VectorType(byte, lanes).as_pointer()), align=1)
        pairs = builder.zext(stored, many)
        upper, lower = (builder.lshr(pairs, ir.Constant(many, [4] * lanes)), pairs)
        codes = builder.and_(builder.select(above, upper, lower), ir.Constant(many, [15] * lanes))
        floats = ir.VectorType(ir.FloatType(), lanes)
        doubled = builder.fadd(*[builder.sitofp(codes, floats)] * 2)
        return builder.fsub(doubled, ir.Constant(floats, [15.0] * lanes))

    @emits(types.float32, types.int64, types.int64)
    def read(builder: Any, address: Any, index: Any) -> Any:
        return builder.extract_element(widened(builder, address, index, 1), ir.Constant(ir.IntType(32), 0))

    @emits(VECTOR, types.int64, types.int64)
    def load(builder: Any, address: Any, index: Any) -> Any:
        return widened(builder, address, index, LANES)

    return Storage(read, load, 0)


STORAGE = {
    "float32": Storage(f32, load_f32, 4),
    "bfloat16": Storage(bf16, load_bf16, 2),
    "float16": Storage(f16, load_f16, 2),
    "int8": Storage(i8, load_i8, 1),
}
