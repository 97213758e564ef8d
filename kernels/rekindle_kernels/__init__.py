"""Paged attention for JAX on CPU, GPU and TPU behind one call."""

from rekindle_kernels.api import (
    abstract_pages,
    choose,
    current_platform,
    implementation_names,
    init_pages,
    paged_attention,
    write_kv,
    zeros,
)
from rekindle_kernels.calls import Call, Implementation, LayerKV, storage_dtype
from rekindle_kernels.pages import gather_pages, scatter_pages

__all__ = [
    "Call",
    "Implementation",
    "LayerKV",
    "abstract_pages",
    "choose",
    "current_platform",
    "gather_pages",
    "implementation_names",
    "init_pages",
    "paged_attention",
    "scatter_pages",
    "storage_dtype",
    "write_kv",
    "zeros",
]
