"""Heads on their way from products to attention: queries and keys are normed and rotated, keys and values written.

These are moves with a little arithmetic. XLA:CPU decides for every element of a concatenation which part it comes from:
0.5 ms a layer for 512 tokens of 12 heads of 64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.kernels.rotation import rotator
from rekindle_kernels.native.language.dot_products import store_i8
from rekindle_kernels.native.language.handler import Kernel, job_layout, nothing
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import free, i32, malloc, set_f32
from rekindle_kernels.native.language.records import dim, take
from rekindle_kernels.native.language.vector import (
    LANES,
    add,
    divide,
    larger_magnitude,
    largest_magnitude,
    load_f32,
    multiply,
    multiply_add,
    nearest,
    splat,
    store,
    subtract,
    total,
)

TOKENS = 16  # of a block
ZERO, ONE = np.float32(0), np.float32(1)

ROPE_JOB = job_layout(
    "rope",
    {
        "qk": "[tokens, source_heads, head_dim]",
        "qkv": "[tokens, heads + 2 kv_heads, head_dim]",
        "cos": "[tokens, frequencies]",
        "sin": "[tokens, frequencies]",
        "norm": "[heads + kv_heads, head_dim], or 0",
        "q": "[tokens, heads, head_dim]",
        "k": "[tokens, kv_heads, head_dim]",
        "v": "[tokens, kv_heads, head_dim]",
    },
    "tokens source_heads head_dim frequencies heads kv_heads",
    numbers={"eps": "added to the mean square"},
)


@inline
def normalise_head(job: Any, x: int, weight: int, out: int) -> None:
    """One head of one token, divided by its root mean square and multiplied by the weight."""
    width, squares = job.head_dim, splat(ZERO)
    for i in range(0, width, LANES):
        squares = multiply_add(load_f32(x, i), load_f32(x, i), squares)
    mean = total(squares) / np.float32(width)
    factor = splat(ONE / np.float32(math.sqrt(mean + job.eps)))
    for i in range(0, width, LANES):
        store(out, i, multiply(multiply(load_f32(x, i), factor), load_f32(weight, i)))


@inline
def rotate_heads(job: Any, t: int, first: int, count: int, out: int) -> None:
    """The heads [first, first + count) of one token, as `xla.attention.rotate`; what no frequency rotates is copied."""
    width, half = job.head_dim, job.frequencies
    cos, sin = job.cos + t * half * 4, job.sin + t * half * 4
    for head in range(count):
        x = job.qk + (t * job.source_heads + first + head) * width * 4
        if job.norm != 0:
            normalise_head(job, x, job.norm + (first + head) * width * 4, out + head * width * 4)
            x = out + head * width * 4
        for i in range(0, half, LANES):
            a, b, c, s = load_f32(x, i), load_f32(x, half + i), load_f32(cos, i), load_f32(sin, i)
            store(out, head * width + i, subtract(multiply(a, c), multiply(b, s)))
            store(out, head * width + half + i, multiply_add(b, c, multiply(a, s)))
        for i in range(2 * half, width, LANES):
            store(out, head * width + i, load_f32(x, i))


def rope_kernel() -> Kernel:
    """Queries and keys of qk, normed and rotated, and the values of qkv."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        take(frame, job)
        job.tokens = dim(frame.qk, 0)
        job.source_heads = dim(frame.qk, 1)
        job.head_dim = dim(frame.qk, 2)
        job.frequencies = dim(frame.cos, 1)
        job.heads = dim(frame.q, 1)
        job.kv_heads = dim(frame.k, 1)
        return (job.tokens + TOKENS - 1) // TOKENS

    @jit
    def block(job: Any, index: int) -> None:
        heads, kv_heads, width = job.heads, job.kv_heads, job.head_dim
        for t in range(index * TOKENS, min(job.tokens, (index + 1) * TOKENS)):
            rotate_heads(job, t, 0, heads, job.q + t * heads * width * 4)
            rotate_heads(job, t, heads, kv_heads, job.k + t * kv_heads * width * 4)
            values = job.qkv + (t * (heads + 2 * kv_heads) + heads + kv_heads) * width * 4
            out = job.v + t * kv_heads * width * 4
            for i in range(0, kv_heads * width, LANES):
                store(out, i, load_f32(values, i))

    return Kernel(kernel_table.ROPE, ROPE_JOB, prepare, block, nothing)


# A step's keys and values on their way into pages, rounded to what the pages store.
#
# XLA:CPU rounds to bfloat16 one by one: 0.25 ms a layer for 512 tokens of 12 heads of 64.

WRITE_JOB = job_layout(
    "write",
    {
        "k": "[tokens, kv_heads, head_dim]",
        "v": "[tokens, kv_heads, head_dim]",
        "page_ids": "int32 [tokens]",
        "offsets": "int32 [tokens]",
        "pages": "[pages, 2, kv_heads, page_size, head_dim]",
    },
    "page_count tokens kv_heads page_size head_dim",
)


def write_kernel(put: Any, size: int) -> Kernel:
    """Return keys and values into pages of numbers of `size` bytes, in place; `put` stores sixteen float32 as such
    numbers."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        take(frame, job)
        job.pages = frame.out.data
        job.tokens = dim(frame.k, 0)
        job.page_count = dim(frame.pages, 0)
        job.kv_heads = dim(frame.pages, 2)
        job.page_size = dim(frame.pages, 3)
        job.head_dim = dim(frame.pages, 4)
        return (job.tokens + TOKENS - 1) // TOKENS

    @inline
    def write_vector(job: Any, source: int, number: int) -> None:
        """One head of one token to the vector of that number, counted through all pages."""
        out = job.pages + number * job.head_dim * size
        for i in range(0, job.head_dim, LANES):
            put(out, i, load_f32(source, i))

    @jit
    def block(job: Any, index: int) -> None:
        heads, page_size, width = job.kv_heads, job.page_size, job.head_dim
        for t in range(index * TOKENS, min(job.tokens, (index + 1) * TOKENS)):
            page, offset = i32(job.page_ids, t), i32(job.offsets, t)
            if page < 0 or page >= job.page_count or offset < 0 or offset >= page_size:
                page, offset = 0, 0  # the scratch page
            for k in range(heads):
                at = (t * heads + k) * width * 4
                write_vector(job, job.k + at, (page * 2 * heads + k) * page_size + offset)
                write_vector(job, job.v + at, ((page * 2 + 1) * heads + k) * page_size + offset)

    return Kernel(kernel_table.WRITE_KV, WRITE_JOB, prepare, block, nothing)


PACKED_JOB = job_layout(
    "writepacked",
    {
        "k": "[tokens, kv_heads, head_dim]",
        "v": "[tokens, kv_heads, head_dim]",
        "page_ids": "int32 [tokens]",
        "offsets": "int32 [tokens]",
        "pages": "[pages, 1, kv_heads, page_size, bytes of a key]",
        "values": "[pages, 1, kv_heads, page_size, bytes of a value]",
        "scales": "[pages, 2, kv_heads, page_size]",
    },
    "page_count tokens kv_heads page_size",
)


def _quantizer(head_dim: int, bits: int) -> Any:
    """Return `put(x, out)`: the head at x becomes integers at out, as `packed_pages` and `pages.quantize` round it; the
    result is its scale.
    """
    half, most = head_dim // 2, np.float32(127 if bits == 8 else 15)
    one_half = np.float32(0.5)

    @inline
    def scale_of(x: int) -> float:
        top = splat(ZERO)
        for i in range(0, head_dim, LANES):
            top = larger_magnitude(top, load_f32(x, i))
        return largest_magnitude(top) / most

    @inline
    def steps(x: int, i: int, unit: float) -> Any:
        return divide(load_f32(x, i), splat(unit))

    @inline
    def code(x: int, i: int, unit: float) -> Any:
        return nearest(multiply(add(steps(x, i, unit), splat(most)), splat(one_half)))

    @inline
    def put_eight(x: int, out: int) -> float:
        scale = scale_of(x)
        unit = ONE if scale == ZERO else scale
        for i in range(0, head_dim, LANES):
            store_i8(out, i, nearest(steps(x, i, unit)))
        return scale

    @inline
    def put_four(x: int, out: int) -> float:
        scale = scale_of(x)
        unit = ONE if scale == ZERO else scale
        for i in range(0, half, LANES):
            store_i8(out, i, multiply_add(code(x, half + i, unit), splat(np.float32(16)), code(x, i, unit)))
        return scale

    return put_eight if bits == 8 else put_four


def packed_write_kernel(head_dim: int, key_bits: int) -> Kernel:
    """Return keys and values into packed pages, in place: each head is rotated and quantised."""
    rotate, put_key, put_value = rotator(head_dim), _quantizer(head_dim, key_bits), _quantizer(head_dim, 4)
    key_bytes, value_bytes = head_dim * key_bits // 8, head_dim // 2

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        take(frame, job)
        job.pages = frame.keys_now.data
        job.values = frame.values_now.data
        job.scales = frame.scales_now.data
        job.tokens = dim(frame.k, 0)
        job.page_count = dim(frame.pages, 0)
        job.kv_heads = dim(frame.pages, 2)
        job.page_size = dim(frame.pages, 3)
        return (job.tokens + TOKENS - 1) // TOKENS

    @jit
    def block(job: Any, index: int) -> None:
        heads, page_size = job.kv_heads, job.page_size
        x = malloc(head_dim * 4)
        for t in range(index * TOKENS, min(job.tokens, (index + 1) * TOKENS)):
            page, offset = i32(job.page_ids, t), i32(job.offsets, t)
            if page < 0 or page >= job.page_count or offset < 0 or offset >= page_size:
                page, offset = 0, 0  # the scratch page
            for k in range(heads):
                at, number = (t * heads + k) * head_dim * 4, (page * heads + k) * page_size + offset
                scales = job.scales + ((page * 2 * heads + k) * page_size + offset) * 4
                rotate(job.k + at, x)
                set_f32(scales, 0, put_key(x, job.pages + number * key_bytes))
                rotate(job.v + at, x)
                set_f32(scales, heads * page_size, put_value(x, job.values + number * value_bytes))
        free(x)

    return Kernel(kernel_table.WRITE_PACKED, PACKED_JOB, prepare, block, nothing)
