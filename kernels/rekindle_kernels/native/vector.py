"""Sixteen float32 in a register, as a numba type: where the compiler would not keep sums in registers by itself."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from rekindle_kernels.native.memory import widen_bf16

LANES = 16
_FLOATS = ir.VectorType(ir.FloatType(), LANES)


class Vector(types.Type):  # type: ignore[misc]
    """The type of a numba variable that holds `LANES` float32."""

    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


VECTOR = Vector()


@register_model(Vector)  # type: ignore[untyped-decorator]
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _FLOATS)


def _loader(element: ir.Type, widen: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typing_context: Any, address: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.gep(builder.inttoptr(args[0], element.as_pointer()), [args[1]])
            stored = ir.VectorType(element, LANES)
            return widen(builder, builder.load(builder.bitcast(pointer, stored.as_pointer()), align=1))

        return VECTOR(types.int64, types.int64), codegen

    return load


load_f32 = _loader(ir.FloatType(), lambda builder, x: x)
load_bf16 = _loader(ir.IntType(16), widen_bf16)
load_i8 = _loader(ir.IntType(8), lambda builder, x: builder.sitofp(x, _FLOATS))


@intrinsic  # type: ignore[untyped-decorator]
def store(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(args[0], ir.FloatType().as_pointer()), [args[1]])
        builder.store(args[2], builder.bitcast(pointer, _FLOATS.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, VECTOR), codegen


@intrinsic  # type: ignore[untyped-decorator]
def splat(typing_context: Any, value: Any) -> Any:
    """The same number in every lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), args[0], ir.Constant(ir.IntType(32), 0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return builder.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), lanes)

    return VECTOR(types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        return builder.call(get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), args)

    return VECTOR(VECTOR, VECTOR, VECTOR), codegen


@intrinsic  # type: ignore[untyped-decorator]
def total(typing_context: Any, value: Any) -> Any:
    """The sum of all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), _FLOATS])
        reduce = get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
        return builder.call(reduce, [ir.Constant(ir.FloatType(), 0.0), args[0]], fastmath=("reassoc",))

    return types.float32(VECTOR), codegen
