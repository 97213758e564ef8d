"""Every native kernel, made by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rekindle_kernels.native import kernel_table as table
from rekindle_kernels.native.chain_plan import CHAIN
from rekindle_kernels.native.cpu import has_feature
from rekindle_kernels.native.kernel_spec import KernelSpec, Variant
from rekindle_kernels.native.kernels import (
    activate,
    adapter,
    argmax,
    convolution,
    decode,
    delta,
    gemm,
    int4,
    mask_gate,
    matvec,
    prefill,
    rms_norm,
    rope,
    sample,
    scan,
    write_kv,
)
from rekindle_kernels.native.kernels.attention_job import StoredHeads
from rekindle_kernels.native.kernels.chain_runner import ChainRunner
from rekindle_kernels.native.language import dot_products, vector
from rekindle_kernels.native.language.handler import Kernel
from rekindle_kernels.native.language.vector import STORAGE


def make(name: str) -> Kernel | ChainRunner:
    """Return the kernel of that name, ready to be compiled."""
    if name == CHAIN:
        return ChainRunner()
    variant = table.identify(name)
    assert variant is not None, f"there is no kernel {name}"
    return MAKERS[variant.spec](variant)


def _matvec(kernel: Variant) -> Kernel:
    return matvec.kernel(STORAGE[kernel.dtype], scaled=kernel.dtype == "int8")


def _gemm(kernel: Variant) -> Kernel:
    add = dot_products.add_pairs if kernel.dtype == "bfloat16" else dot_products.add_quads
    return gemm.kernel(STORAGE[kernel.dtype].size, add)


def _grouped(weight: str, kernel: Variant) -> Kernel:
    return int4.kernel(kernel.dtype, weight)


def _write_kv(kernel: Variant) -> Kernel:
    put = vector.store if kernel.dtype == "float32" else vector.store_bf16
    return write_kv.kernel(put, STORAGE[kernel.dtype].size)


def _stored(kernel: Variant) -> StoredHeads:
    return StoredHeads(STORAGE[kernel.dtype], kernel.head_dim, scaled=kernel.dtype == "int8")


def _decode(kernel: Variant) -> Kernel:
    return decode.kernel(_stored(kernel))


def _prefill(kernel: Variant) -> Kernel:
    paired = kernel.dtype == "bfloat16" and kernel.head_dim % 32 == 0 and has_feature("avx512bf16")
    return prefill.kernel(_stored(kernel), paired)


def _adapter(kernel: Variant) -> Kernel:
    paired = kernel.dtype == "bfloat16" and has_feature("avx512bf16")
    return adapter.kernel(STORAGE[kernel.dtype], gated=kernel.spec is table.ADAPTER_GATE, paired=paired)


MAKERS: dict[KernelSpec, Callable[[Variant], Kernel]] = {
    table.MATVEC: _matvec,
    table.GEMM: _gemm,
    **{spec: partial(_grouped, weight) for weight, spec in table.GROUPED.items()},
    table.RMS_NORM: lambda kernel: rms_norm.kernel(),
    table.GATED_ROWS: lambda kernel: activate.kernel(),
    table.ROPE: lambda kernel: rope.kernel(),
    table.WRITE_KV: _write_kv,
    table.DECODE: _decode,
    table.PREFILL: _prefill,
    table.ARGMAX: lambda kernel: argmax.kernel(),
    table.SAMPLE: lambda kernel: sample.kernel(),
    table.GATE: lambda kernel: mask_gate.kernel(),
    table.CONVOLUTION: lambda kernel: convolution.kernel(),
    table.GATED_DELTA: lambda kernel: delta.kernel(),
    table.SELECTIVE_SCAN: lambda kernel: scan.kernel(),
    table.ADAPTER: _adapter,
    table.ADAPTER_GATE: _adapter,
}
