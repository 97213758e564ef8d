"""Plain memory as numba sees it: addresses are integers, and these intrinsics read and write through them.

Numba's arrays would do, but each of them costs a fifth of a second of compilation and references to its runtime, which
keeps the compiled code from being stored and loaded without numba. An index counts elements.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from rekindle_kernels.native import cpu
from rekindle_kernels.native.language.jit import emits

WORD = ir.IntType(64)
LINE = 64  # bytes of the cache


def _reader(numba_type: Any, stored: ir.Type, widen: Any) -> Any:
    @emits(numba_type, types.int64, types.int64)
    def read(builder: Any, address: Any, index: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(address, stored.as_pointer()), [index])
        return widen(builder, builder.load(pointer))

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
    @emits(types.void, types.int64, types.int64, numba_type)
    def write(builder: Any, address: Any, index: Any, value: Any) -> None:
        pointer = builder.gep(builder.inttoptr(address, stored.as_pointer()), [index])
        if isinstance(stored, ir.IntType) and stored.width < 64:
            value = builder.trunc(value, stored)
        builder.store(value, pointer)

    return write


set_word = _writer(types.int64, WORD)
set_i32 = _writer(types.int64, ir.IntType(32))
set_f32 = _writer(types.float32, ir.FloatType())


@emits(types.int64, types.int64, types.int64)
def fetch_add(builder: Any, address: Any, value: Any) -> Any:
    """Add to the word at `address`, and return its earlier value. All memory accesses are ordered around it."""
    return builder.atomic_rmw("add", builder.inttoptr(address, WORD.as_pointer()), value, "seq_cst")


@emits(types.int64, types.int64)
def acquire(builder: Any, address: Any) -> Any:
    """Return the word at `address`; whatever was written before it was published can be read then."""
    return builder.load_atomic(builder.inttoptr(address, WORD.as_pointer()), "acquire", 8)


@emits(types.void, types.int64, types.int64)
def publish(builder: Any, address: Any, value: Any) -> None:
    """Write the word at `address`; a thread that acquires it sees all earlier writes."""
    builder.store_atomic(value, builder.inttoptr(address, WORD.as_pointer()), "release", 8)


@emits(types.int64, types.int64, types.int64)
def call(builder: Any, function: Any, argument: Any) -> Any:
    """Return `function(argument)` of two addresses."""
    pointer = builder.inttoptr(function, ir.FunctionType(WORD, [WORD]).as_pointer())
    return builder.call(pointer, [argument])


def _call(builder: Any, name: str, argument: Any) -> Any:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(WORD, [WORD]), name)
    return builder.call(function, [argument])


def _external(name: str) -> Any:
    @emits(types.int64, types.int64)
    def function(builder: Any, argument: Any) -> Any:
        return _call(builder, name, argument)

    return function


@emits(types.int64, types.int64)
def malloc(builder: Any, size: Any) -> Any:
    """Return memory of the C library's, from the begin of a cache line on: a vector that lies in two lines is read
    twice."""
    block = _call(builder, "malloc", builder.add(size, WORD(LINE)))
    address = builder.and_(builder.add(block, WORD(LINE)), WORD(-LINE))
    builder.store(block, _owner(builder, address))
    return address


@emits(types.int64, types.int64)
def free(builder: Any, address: Any) -> Any:
    """Frees memory that `malloc` returned."""
    return _call(builder, "free", builder.load(_owner(builder, address)))


def _owner(builder: Any, address: Any) -> Any:
    """Return where the C library's own address is kept: right before the cache line that `malloc` gave."""
    return builder.inttoptr(builder.sub(address, WORD(8)), WORD.as_pointer())


give_way, this_thread = _external("sched_yield"), _external("pthread_self")  # their argument says nothing
sleep = _external("usleep")  # microseconds


def address_of(name: str) -> Any:
    """Return a function `() -> address` of the symbol `name`, known when the code is loaded."""

    @emits(types.int64)
    def address(builder: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), [WORD]), name)
        return builder.ptrtoint(function, WORD)

    return address


def prefetch_at(builder: Any, address: Any, cache: int | None = None) -> None:
    """Emit the instructions of `prefetch` into a level of cache; None is the level for memory other than weights.

    In the first level, lines wait for one of its few places for misses, and so do the reads after them, unless as much
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

    @emits(types.void, types.int64)
    def prefetch(builder: Any, address: Any) -> None:
        """Ask for the cache line at `address`; any address will do."""
        prefetch_at(builder, address, cache)

    return prefetch


prefetch = prefetcher()
