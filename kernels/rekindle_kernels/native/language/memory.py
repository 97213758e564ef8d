"""Plain memory as numba sees it: addresses are integers, and these intrinsics read and write through them.

Numba's arrays would do, but each of them costs a fifth of a second of compilation and references to its runtime, which
keeps the compiled code from being stored and loaded without numba. An index counts elements.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rekindle_kernels.native import cpu

WORD = ir.IntType(64)
LINE = 64  # bytes of the cache


def _reader(numba_type: Any, stored: ir.Type, widen: Any) -> Any:
    @intrinsic
    def read(typing_context: Any, address: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.gep(builder.inttoptr(args[0], stored.as_pointer()), [args[1]])
            return widen(builder, builder.load(pointer))

        return numba_type(types.int64, types.int64), codegen

    return read


def widen_bf16(builder: Any, bits: Any) -> Any:
    """Return the bits of a bfloat16, or of a vector of them, as float32."""
    wide, result = ir.IntType(32), ir.FloatType()
    if isinstance(bits.type, ir.VectorType):
        wide, result = ir.VectorType(wide, bits.type.count), ir.VectorType(result, bits.type.count)
        sixteen = ir.Constant(wide, [16] * bits.type.count)
    else:
        sixteen = ir.Constant(wide, 16)
    return builder.bitcast(builder.shl(builder.zext(bits, wide), sixteen), result)


word = _reader(types.int64, WORD, lambda builder, x: x)
i32 = _reader(types.int64, ir.IntType(32), lambda builder, x: builder.sext(x, WORD))
f32 = _reader(types.float32, ir.FloatType(), lambda builder, x: x)
bf16 = _reader(types.float32, ir.IntType(16), widen_bf16)
f16 = _reader(types.float32, ir.HalfType(), lambda builder, x: builder.fpext(x, ir.FloatType()))
i8 = _reader(types.float32, ir.IntType(8), lambda builder, x: builder.sitofp(x, ir.FloatType()))


def _writer(numba_type: Any, stored: ir.Type) -> Any:
    @intrinsic
    def write(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.gep(builder.inttoptr(args[0], stored.as_pointer()), [args[1]])
            value = args[2]
            if isinstance(stored, ir.IntType) and stored.width < 64:
                value = builder.trunc(value, stored)
            builder.store(value, pointer)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, numba_type), codegen

    return write


set_word = _writer(types.int64, WORD)
set_i32 = _writer(types.int64, ir.IntType(32))
set_f32 = _writer(types.float32, ir.FloatType())


@intrinsic
def fetch_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to the word at `address`, and return what it was before. All memory accesses are ordered around it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], WORD.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def acquire(typing_context: Any, address: Any) -> Any:
    """Return the word at `address`; whatever was written before it was published can be read then."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], WORD.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def publish(typing_context: Any, address: Any, value: Any) -> Any:
    """Write the word at `address`; a thread that acquires it sees everything that was written before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], WORD.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call(typing_context: Any, function: Any, argument: Any) -> Any:
    """Return `function(argument)` of two addresses."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.FunctionType(WORD, [WORD]).as_pointer())
        return builder.call(pointer, [args[1]])

    return types.int64(types.int64, types.int64), codegen


def _call(builder: Any, name: str, argument: Any) -> Any:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(WORD, [WORD]), name)
    return builder.call(function, [argument])


def _external(name: str) -> Any:
    @intrinsic
    def function(typing_context: Any, argument: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _call(builder, name, args[0])

        return types.int64(types.int64), codegen

    return function


@intrinsic
def malloc(typing_context: Any, size: Any) -> Any:
    """Return memory of the C library's, from the begin of a cache line on: a vector that lies in two lines is read
    twice."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = _call(builder, "malloc", builder.add(args[0], WORD(LINE)))
        address = builder.and_(builder.add(block, WORD(LINE)), WORD(-LINE))
        builder.store(block, _owner(builder, address))
        return address

    return types.int64(types.int64), codegen


@intrinsic
def free(typing_context: Any, address: Any) -> Any:
    """Frees memory that `malloc` returned."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "free", builder.load(_owner(builder, args[0])))

    return types.int64(types.int64), codegen


def _owner(builder: Any, address: Any) -> Any:
    """Return where the C library's own address is kept: right before the cache line that `malloc` gave."""
    return builder.inttoptr(builder.sub(address, WORD(8)), WORD.as_pointer())


give_way, this_thread = _external("sched_yield"), _external("pthread_self")  # their argument says nothing
sleep = _external("usleep")  # microseconds


def address_of(name: str) -> Any:
    """Return a function `() -> address` of the symbol `name`, known when the code is loaded."""

    @intrinsic
    def address(typing_context: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), [WORD]), name)
            return builder.ptrtoint(function, WORD)

        return types.int64(), codegen

    return address


def prefetch_at(builder: Any, address: Any, cache: int | None = None) -> None:
    """Emit the instructions of `prefetch` into a level of cache; None is the level for memory other than weights.

    In the first level, lines wait for one of its few places for misses, and so do the reads behind them, unless as much
    is computed between them as for 4 bits. One core of a busy Zen 4, GB/s, medians of turns, without prefetching, 8 KiB
    ahead into the first level, and into the second: one row of bfloat16 30, 17, 24; of int8 18, 19, 21; of 4 bits 27,
    31, 23; two rows of bfloat16 11, 16, 24.
    """
    level = cpu.prefetch().several.cache if cache is None else cache
    if level == 0:
        return
    flag, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, locality, data = (ir.Constant(flag, number) for number in (0, 4 - level, 1))
    builder.call(function, [builder.inttoptr(address, pointer), read, locality, data])


def prefetcher(cache: int | None = None) -> Any:
    """Return `prefetch(address)` into a level of cache, as in `prefetch_at`."""

    @intrinsic
    def prefetch(typing_context: Any, address: Any) -> Any:
        """Ask for the cache line at `address`; any address will do."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            prefetch_at(builder, args[0], cache)
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return prefetch


prefetch = prefetcher()
