"""The cases of attention that the Mosaic GPU prefill takes."""

from __future__ import annotations

from dataclasses import replace

from helpers.kernel_cases import CASES, Case
from rekindle_kernels.pallas.gpu import mosaic

EVERYTHING = Case(
    "window_soft_cap_sinks_over_a_full_ring",
    decode=(17,),
    prefill=((70, 330), (3, 3)),
    padding=2,
    heads=2,
    kv_heads=1,
    head_dim=64,
    dtype="bfloat16",
    sliding_window=200,
    soft_cap=5.0,
    sinks=True,
)


def supported() -> list[Case]:
    """The shared cases that have prefill, in the types and head sizes that the kernel takes."""
    found = []
    for case in CASES:
        if not case.prefill and not case.padding:
            continue
        dtype = case.dtype if case.dtype in mosaic.TYPES else "bfloat16"
        head_dim = case.head_dim if case.head_dim in mosaic.HEAD_DIMS else 64
        kv_dtype = None if case.kv_dtype == "bfloat16" else case.kv_dtype
        found.append(replace(case, dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim))
    return [case for case in dict.fromkeys(found) if case.kv_dtype is None]
