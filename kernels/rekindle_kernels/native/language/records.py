"""Records in memory as numba types: `job.width` reads a field of a layout, `job.width = 3` writes it.

The value of a record is its address. The frame of a call has the arrays of the kernel's table as attributes: `frame.x`
is a buffer, whose data and sizes are `frame.x.data` and `dim(frame.x, 0)`; `frame.settings`, and operands with fields,
are records; `frame.has_norm` tells whether an optional operand is there. `take(frame, job)` notes them in a job.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.core.imputils import lower_getattr_generic, lower_setattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, register_model

from rekindle_kernels.native.kernel_table import KernelSpec
from rekindle_kernels.native.language.jit import inline
from rekindle_kernels.native.language.memory import WORD, f32, i32, word
from rekindle_kernels.native.layout import BUFFER as BUFFER_LAYOUT
from rekindle_kernels.native.layout import CALL_FRAME, SIZES, RecordField, RecordLayout

INT, FLOAT = ir.IntType(32), ir.FloatType()
_STORED = {"word": WORD, "int32": INT, "float32": FLOAT}
_NUMBA = {"word": types.int64, "int32": types.int64, "float32": types.float32}


class RecordType(types.Type):
    """The type of a variable that holds the address of a record."""

    def __init__(self, layout: RecordLayout) -> None:
        self.layout = layout
        super().__init__(name=f"Record({layout.name})")


class Frame(types.Type):
    """The type of a variable that holds the address of a call's frame."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.arrays = {array.name: ("operands", spec.index(array.name)) for array in spec.operands}
        self.arrays |= {array.name: ("results", index) for index, array in enumerate(spec.results)}
        assert len(self.arrays) == len(spec.operands) + len(spec.results), f"{spec.kind} has two arrays of one name"
        self.records = {array.name: array.record for array in spec.operands if array.record is not None}
        if spec.settings_layout is not None:
            self.arrays["settings"] = "operands", spec.index("settings")
            self.records["settings"] = spec.settings_layout
        super().__init__(name=f"Frame({spec.kind})")


@register_model(RecordType)
@register_model(Frame)
class _AddressModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, WORD)


BUFFER = RecordType(BUFFER_LAYOUT)


@cache
def _record(layout: RecordLayout) -> RecordType:
    return RecordType(layout)


@infer_getattr
class _RecordAttributes(AttributeTemplate):
    key = RecordType

    def generic_resolve(self, record: RecordType, name: str) -> Any:
        field = record.layout.fields.get(name)
        return None if field is None else _NUMBA[field.kind]


@infer_getattr
class _FrameAttributes(AttributeTemplate):
    key = Frame

    def generic_resolve(self, frame: Frame, name: str) -> Any:
        if name.removeprefix("has_") in frame.spec.optional and name.startswith("has_"):
            return types.boolean
        if name in frame.records:
            return _record(frame.records[name])
        return BUFFER if name in frame.arrays else None


def _pointer(builder: Any, address: Any, field: RecordField) -> Any:
    stored = _STORED[field.kind]
    return builder.gep(builder.inttoptr(address, stored.as_pointer()), [WORD(field.offset // SIZES[field.kind])])


@inline
def _read_word(address: int, index: int) -> int:
    return word(address, index)


@inline
def _read_int32(address: int, index: int) -> int:
    return i32(address, index)


@inline
def _read_float32(address: int, index: int) -> float:
    return f32(address, index)


_READERS = {"word": _read_word, "int32": _read_int32, "float32": _read_float32}


@lower_getattr_generic(RecordType)
def _read(context: Any, builder: Any, record: RecordType, address: Any, name: str) -> Any:
    # By a call, which is inlined after each function has been optimised by itself. With a plain load LLVM copies loops
    # for every field they depend on before that, and object code gets up to 2.6 times as long.
    field = record.layout.fields[name]
    reader = context.typing_context.resolve_value_type(_READERS[field.kind])
    signature = reader.get_call_type(context.typing_context, (types.int64, types.int64), {})
    call = context.get_function(reader, signature)
    return call(builder, [address, WORD(record.layout.index(name))])


@lower_setattr_generic(RecordType)
def _write(context: Any, builder: Any, signature: Any, args: Any, name: str) -> None:
    field = signature.args[0].layout.fields[name]
    value = builder.trunc(args[1], INT) if field.kind == "int32" else args[1]
    builder.store(value, _pointer(builder, args[0], field))


@lower_getattr_generic(Frame)
def _array(context: Any, builder: Any, frame: Frame, address: Any, name: str) -> Any:
    if name not in frame.arrays:
        layout = frame.records["settings"]
        present = builder.load(
            _pointer(builder, _array(context, builder, frame, address, "settings"), layout.fields["present"])
        )
        bit = INT(frame.spec.present_bit(name.removeprefix("has_")))
        return builder.icmp_signed("!=", builder.and_(present, bit), INT(0))
    group, index = frame.arrays[name]
    buffers = builder.load(_pointer(builder, address, CALL_FRAME.fields[group]))
    buffer = builder.load(_pointer(builder, buffers, RecordField(8 * index, "word")))
    return builder.load(_pointer(builder, buffer, BUFFER_LAYOUT.fields["data"])) if name in frame.records else buffer


@intrinsic
def take(typing_context: Any, frame: Any, job: Any) -> Any:
    """Copy the arrays' addresses and the settings of a call into the job's fields of the same names; 0 for an absent
    array. Other fields are left alone.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        settings = frame.records.get("settings")
        for name, field in job.layout.fields.items():
            place = _pointer(builder, args[1], field)

            def note_address(name: str = name, place: Any = place) -> None:
                buffer = _array(context, builder, frame, args[0], name)
                builder.store(builder.load(_pointer(builder, buffer, BUFFER_LAYOUT.fields["data"])), place)

            if name in frame.records:
                continue
            if name in frame.spec.optional:
                builder.store(WORD(0), place)
                with builder.if_then(_array(context, builder, frame, args[0], f"has_{name}")):
                    note_address()
            elif name in frame.arrays:
                note_address()
            elif settings is not None and name in settings.fields:
                record = _array(context, builder, frame, args[0], "settings")
                number = builder.load(_pointer(builder, record, settings.fields[name]))
                builder.store(builder.sext(number, WORD) if field.kind == "word" else number, place)
        return context.get_dummy_value()

    return types.void(frame, job), codegen


def typed(numba_type: types.Type) -> Any:
    """Return a function from an address to the record or frame that lies there."""

    @intrinsic
    def at(typing_context: Any, address: Any) -> Any:
        return numba_type(types.int64), lambda context, builder, signature, args: args[0]

    return at


def record_at(layout: RecordLayout) -> Any:
    """Return a function from an address to the record that lies there."""
    return typed(_record(layout))


def frame_at(spec: KernelSpec) -> Any:
    """Return a function from an address to the frame of a call of that kernel."""
    return typed(Frame(spec))


@intrinsic
def address_of_record(typing_context: Any, record: Any) -> Any:
    """Return the address of a record."""
    return types.int64(record), lambda context, builder, signature, args: args[0]


@intrinsic
def dim(typing_context: Any, buffer: Any, axis: Any) -> Any:
    """Return the size of a buffer's axis."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dims = builder.load(_pointer(builder, args[0], BUFFER_LAYOUT.fields["dims"]))
        return builder.load(builder.gep(builder.inttoptr(dims, WORD.as_pointer()), [args[1]]))

    return types.int64(BUFFER, types.int64), codegen
