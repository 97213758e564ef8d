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
    "pages": "[pages, 2, kv_heads, page_size, head_dim]; of packed pages, keys alone: [pages, 1, …]",
    "values": "as pages, of packed pages; else `pages` again",
    "scales": "[pages, 2, kv_heads, page_size], of int8 and packed pages",
    "page_table": "int32 [rows, tables, width]",
    "lens": "int32 [rows]",
    "sinks": "[heads], or 0",
    "window": "keys that a query sees, or 0 for all of them",
    "out": "[tokens, heads, head_dim]",
    "width": "pages of a row of the page table",
    "tables": "of a row: 1, or one for each kv head",
    "apart": "1 where each kv head has a page table of its own, else 0",
}
PLAIN = "heads kv_heads page_size page_count"
NUMBERS = {"scale": "of logits", "soft_cap": "0 for none"}


class StoredHeads(NamedTuple):
    """How the keys and values are stored that a kernel is compiled for."""

    keys: Storage
    values: Storage
    head_dim: int
    scaled: bool  # whether each vector has a scale
    packed: bool = False  # whether keys and values are arrays of their own, of rotated vectors

    @property
    def key_bytes(self) -> int:
        """The bytes of one key."""
        return _nbytes(self.keys, self.head_dim)

    @property
    def value_bytes(self) -> int:
        """The bytes of one value."""
        return _nbytes(self.values, self.head_dim)


def _nbytes(storage: Storage, count: int) -> int:
    """Return the bytes of so many elements."""
    return count * storage.size or count // 2


def describer(stored: StoredHeads) -> Any:
    """Return `describe(frame, job)`: note in the job what the operands say of all rows."""
    packed = stored.packed

    @inline
    def describe(frame: Any, job: Any) -> None:
        take(frame, job)
        if not packed:
            job.values = job.pages
        job.heads = dim(frame.q, 1)
        job.kv_heads = dim(frame.pages, 2)
        job.page_size = dim(frame.pages, 3)
        job.width = dim(frame.page_table, 1)
        job.page_count = dim(frame.pages, 0)
        job.tables = 1
        job.apart = 0

    return describe


@inline
def page_of(job: Any, row: int, index: int, k: int) -> int:
    """Return a page of a row and kv head; the scratch page 0 where the page table names one that does not exist."""
    page = i32(job.page_table, (row * job.tables + k * job.apart) * job.width + index)
    return page if page >= 0 and page < job.page_count else 0


@inline
def vector_of(job: Any, row: int, key: int, part: int, k: int) -> int:
    """Return the number of the vector of `key`, counted through all pages: keys are part 0, values part 1."""
    S, K = job.page_size, job.kv_heads
    page = page_of(job, row, key // S, k)
    return ((page * 2 + part) * K + k) * S + key % S


def addresses(stored: StoredHeads) -> tuple[Any, Any]:
    """Return `key_at(job, row, key, k)` and `value_at(job, row, key, k)`, the addresses of the two vectors of a key."""
    key_bytes, value_bytes, packed = stored.key_bytes, stored.value_bytes, stored.packed

    @inline
    def alone(job: Any, row: int, key: int, k: int) -> int:
        """Return the number of a vector where keys and values are counted apart."""
        S = job.page_size
        return (page_of(job, row, key // S, k) * job.kv_heads + k) * S + key % S

    @inline
    def key_at(job: Any, row: int, key: int, k: int) -> int:
        return job.pages + (alone(job, row, key, k) if packed else vector_of(job, row, key, 0, k)) * key_bytes

    @inline
    def value_at(job: Any, row: int, key: int, k: int) -> int:
        return job.values + (alone(job, row, key, k) if packed else vector_of(job, row, key, 1, k)) * value_bytes

    return key_at, value_at


@inline
def length_of(job: Any, row: int) -> int:
    """Return keys of a row, not more than its pages hold. Of pages that were chosen, the last one is the row's."""
    length, most = i32(job.lens, row), job.width * job.page_size
    if length <= most:
        return length
    return most - job.apart * (job.page_size - 1 - (length - 1) % job.page_size)


@inline
def sink_of(job: Any, h: int) -> float:
    """Return the logit of a head's sink; MASKED where there is none."""
    return f32(job.sinks, h) if job.sinks != 0 else MASKED
