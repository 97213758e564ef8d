"""How weights and pages are stored: what reads one element, what reads sixteen, and bytes of an element."""

from __future__ import annotations

from typing import Any, NamedTuple

from rekindle_kernels.native.language import memory, vector


class Storage(NamedTuple):
    """Both functions take an address and an index of elements, and widen to float32."""

    read: Any
    load: Any
    size: int  # bytes


STORAGE = {
    "float32": Storage(memory.f32, vector.load_f32, 4),
    "bfloat16": Storage(memory.bf16, vector.load_bf16, 2),
    "float16": Storage(memory.f16, vector.load_f16, 2),
    "int8": Storage(memory.i8, vector.load_i8, 1),
}
