"""The common part of decode and prefill attention: the fields of their jobs that describe pages and heads."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rekindle_kernels.native.language.jit import inline
from rekindle_kernels.native.language.memory import f32, i32
from rekindle_kernels.native.language.records import dim, take
from rekindle_kernels.native.language.vector import Storage

MASKED = np.float32(-1e30)  # the logit of a key that is not seen

FIELDS = {
    "q": "[tokens, heads, head_dim]",
    "pages": "[pages, 2, kv_heads, page_size, head_dim]",
    "scales": "[pages, 2, kv_heads, page_size], of int8 pages",
    "page_table": "int32 [rows, width]",
    "lens": "int32 [rows]",
    "sinks": "[heads], or 0",
    "window": "keys that a query sees, or 0 for all of them",
    "out": "[tokens, heads, head_dim]",
    "width": "pages of a row of the page table",
}
PLAIN = "heads kv_heads page_size page_count"
NUMBERS = {"scale": "of logits", "soft_cap": "0 for none"}


class StoredHeads(NamedTuple):
    """How the keys and values are stored that a kernel is compiled for."""

    storage: Storage
    head_dim: int
    scaled: bool  # whether each vector has a scale


@inline
def describe(frame: Any, job: Any) -> None:
    """Note in the job what the operands say of all rows."""
    take(frame, job)
    job.heads = dim(frame.q, 1)
    job.kv_heads = dim(frame.pages, 2)
    job.page_size = dim(frame.pages, 3)
    job.width = dim(frame.page_table, 1)
    job.page_count = dim(frame.pages, 0)


@inline
def page_of(job: Any, row: int, index: int) -> int:
    """Return a page of a row; the scratch page 0 where the page table names one that does not exist."""
    page = i32(job.page_table, row * job.width + index)
    return page if page >= 0 and page < job.page_count else 0


@inline
def length_of(job: Any, row: int) -> int:
    """Return keys of a row, not more than its pages hold."""
    return min(i32(job.lens, row), job.width * job.page_size)


@inline
def sink_of(job: Any, h: int) -> float:
    """Return the logit of a head's sink; MASKED where there is none."""
    return f32(job.sinks, h) if job.sinks != 0 else MASKED
