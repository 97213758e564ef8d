"""Every native kernel, made by its name."""

from __future__ import annotations

from rekindle_kernels.native import (
    chaining,
    decode,
    drawing,
    largest,
    memory,
    norm,
    panels,
    placing,
    prefill,
    rows,
    vector,
    words,
)
from rekindle_kernels.native.build import has_feature
from rekindle_kernels.native.target import Kernel

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_READ = {"float32": memory.f32, "bfloat16": memory.bf16, "float16": memory.f16, "int8": memory.i8}
_LOAD = {"float32": vector.load_f32, "bfloat16": vector.load_bf16, "float16": vector.load_f16, "int8": vector.load_i8}


def make(name: str) -> Kernel | chaining.Chain:
    """`chain`, `split`, `norm`, `largest`, `draw`, `panels_DTYPE`, `matvec_DTYPE`, `write_DTYPE`,
    `decode_DTYPE_HEADSIZE`, `prefill_DTYPE_HEADSIZE`."""
    kind, dtype, *rest = f"{name}_float32".split("_")
    if kind == "chain":
        return chaining.Chain(name)
    if kind == "split":
        return placing.split(name)
    if kind == "norm":
        return norm.kernel(name)
    if kind == "draw":
        return drawing.kernel(name)
    if kind == "largest":
        return largest.kernel(name)
    if kind == "write":
        return placing.write(name, vector.store if dtype == "float32" else vector.store_bf16, SIZES[dtype])
    if kind == "panels":
        return panels.kernel(name, SIZES[dtype], words.add_pairs if dtype == "bfloat16" else words.add_quads)
    if kind == "matvec":
        return rows.kernel(name, _READ[dtype], _LOAD[dtype], SIZES[dtype], scaled=dtype == "int8")
    if kind == "prefill":
        D = int(rest[0])
        paired = dtype == "bfloat16" and D % 32 == 0 and has_feature("avx512bf16")
        return prefill.kernel(name, _READ[dtype], SIZES[dtype], D, scaled=dtype == "int8", paired=paired)
    return decode.kernel(name, _LOAD[dtype], SIZES[dtype], int(rest[0]), scaled=dtype == "int8")
