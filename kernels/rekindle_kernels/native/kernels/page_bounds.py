"""Bounds of the keys of pages, and the pages that decode rows choose by them, as `ops.page_bounds` describes.

Axes: T tokens, R decode rows, H query heads, K kv heads, G = H/K, D head size, S page size, W page-table width, B
chosen pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.kernels.attention_job import StoredHeads
from rekindle_kernels.native.kernels.rotation import rotator
from rekindle_kernels.native.language.handler import Kernel, job_layout, nothing
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import f32, free, i32, malloc, set_f32, set_i32
from rekindle_kernels.native.language.records import dim, take
from rekindle_kernels.native.language.vector import (
    LANES,
    add,
    between,
    divide,
    larger,
    largest,
    load_bf16,
    load_f32,
    multiply,
    multiply_add,
    smaller,
    splat,
    store,
    store_bf16,
    subtract,
    total,
)
from rekindle_kernels.native.language.vector_math import exp

TOKENS = 16  # of a block
ZERO, FARTHEST, NEVER = np.float32(0), np.float32(-80), np.float32(-1e30)  # as `xla.page_bounds`
LOWEST, HIGHEST = -(1 << 31), (1 << 31) - 1  # of the bits of a share

BOUND_JOB = job_layout(
    "pagebounds",
    {
        "pages": "[pages, 2, kv_heads, page_size, head_dim]; of packed pages, keys alone: [pages, 1, …]",
        "scales": "[pages, 2, kv_heads, page_size], of int8 and packed pages",
        "bounds": "bfloat16 [pages, 2, kv_heads, head_dim]",
        "page_ids": "int32 [tokens]",
        "offsets": "int32 [tokens]",
    },
    "page_count tokens kv_heads page_size",
)


def bound_kernel(stored: StoredHeads) -> Kernel:
    """Return the bounds of full pages, in place: a page is full once its last key is written."""
    load, D, KEY, scaled = stored.keys.load, stored.head_dim, stored.key_bytes, stored.scaled
    PARTS = 1 if stored.packed else 2

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        take(frame, job)
        job.bounds = frame.out.data
        job.page_count = dim(frame.pages, 0)
        job.tokens = dim(frame.page_ids, 0)
        job.kv_heads = dim(frame.pages, 2)
        job.page_size = dim(frame.pages, 3)
        return (job.tokens + TOKENS - 1) // TOKENS

    @inline
    def bound(keys: int, scales: int, count: int, low: int, high: int) -> None:
        """Store the smallest and the largest numbers of `count` keys that follow one another."""
        for i in range(0, D, LANES):
            least = most = splat(ZERO)
            for t in range(count):
                x = load(keys + t * KEY, i)
                if scaled:
                    x = multiply(x, splat(f32(scales, t)))
                if t == 0:
                    least, most = x, x
                else:
                    least, most = smaller(least, x), larger(most, x)
            store_bf16(low, i, least)
            store_bf16(high, i, most)

    @jit
    def block(job: Any, index: int) -> None:
        K, S = job.kv_heads, job.page_size
        for t in range(index * TOKENS, min(job.tokens, (index + 1) * TOKENS)):
            page = i32(job.page_ids, t)
            if i32(job.offsets, t) == S - 1 and page >= 0 and page < job.page_count:
                for k in range(K):
                    keys = job.pages + (page * PARTS * K + k) * S * KEY
                    scales = job.scales + (page * 2 * K + k) * S * 4
                    low = job.bounds + (page * 2 * K + k) * D * 2
                    bound(keys, scales, S, low, low + K * D * 2)

    table = kernel_table.BOUND_PACKED if stored.packed else kernel_table.BOUND_PAGES
    return Kernel(table, BOUND_JOB, prepare, block, nothing)


CHOOSE_JOB = job_layout(
    "choose",
    {
        "q": "[tokens, heads, head_dim]",
        "bounds": "bfloat16 [pages, 2, kv_heads, head_dim]",
        "page_table": "int32 [rows, width]",
        "lens": "int32 [rows]",
        "chosen": "int32 [decode rows, kv_heads, most]",
        "rotated": "1 where bounds are of rotated keys",
    },
    "heads kv_heads page_size page_count width most",
    numbers={"scale": "of logits"},
)


@inline
def softmax_into(logits: int, count: int, shares: int) -> None:
    """Add the softmax of `count` logits to the shares."""
    until = (count + LANES - 1) // LANES * LANES
    highest = splat(NEVER)
    for p in range(0, until, LANES):
        highest = larger(highest, load_f32(logits, p))
    top, weights = splat(largest(highest)), splat(ZERO)
    for p in range(0, until, LANES):
        x = exp(larger(splat(FARTHEST), subtract(load_f32(logits, p), top)))
        x = between(x, 0, count - p, ZERO)
        store(logits, p, x)
        weights = add(weights, x)
    whole = splat(total(weights))
    for p in range(0, until, LANES):
        store(shares, p, add(load_f32(shares, p), divide(load_f32(logits, p), whole)))


@inline
def threshold(shares: int, count: int, wanted: int) -> int:
    """Return the bits of the smallest of the `wanted` largest shares. Bits of numbers from 0 on sort like them."""
    low, high = LOWEST, HIGHEST
    while low < high:  # at least `wanted` are not below `low`
        middle = (low + high + 1) // 2
        found = 0
        for p in range(count):
            found += i32(shares, p) >= middle
        if found >= wanted:
            low = middle
        else:
            high = middle - 1
    return low


def choose_kernel(D: int) -> Kernel:
    """Return the pages that each kv head of the rows attends to, in their order, the last page always among them."""
    rotate = rotator(D)

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        take(frame, job)
        job.rotated = frame.settings.rotated
        job.heads = dim(frame.q, 1)
        job.page_count = dim(frame.bounds, 0)
        job.kv_heads = dim(frame.bounds, 2)
        job.page_size = frame.settings.page_size
        job.width = dim(frame.page_table, 1)
        job.most = dim(frame.chosen, 1)
        return frame.settings.decode_rows * job.kv_heads

    @inline
    def split_query(job: Any, q: int, halves: int) -> None:
        """Put the scaled query's numbers below 0 and above 0 into two vectors, with 0 in the other places."""
        if job.rotated != 0:
            rotate(q, halves)
        else:
            for i in range(0, D, LANES):
                store(halves, i, load_f32(q, i))
        for i in range(0, D, LANES):
            x = multiply(load_f32(halves, i), splat(job.scale))
            store(halves, i, smaller(splat(ZERO), x))
            store(halves, D + i, larger(splat(ZERO), x))

    @inline
    def bound_of(halves: int, low: int, high: int) -> float:
        a = splat(ZERO)
        for i in range(0, D, LANES):
            a = multiply_add(load_f32(halves, i), load_bf16(low, i), a)
            a = multiply_add(load_f32(halves, D + i), load_bf16(high, i), a)
        return total(a)

    @jit
    def block(job: Any, index: int) -> None:
        K, S, W, most = job.kv_heads, job.page_size, job.width, job.most
        G, r, k = job.heads // K, index // K, index % K
        pages, out = job.page_table + r * W * 4, job.chosen + index * most * 4
        count = (min(i32(job.lens, r), W * S) + S - 1) // S
        if count <= most:
            for p in range(most):
                set_i32(out, p, i32(pages, p))
        else:
            others = count - 1
            room = (others + LANES - 1) // LANES * LANES
            logits = malloc((G * (room + 2 * D) + room) * 4)
            halves, shares = logits + G * room * 4, logits + G * (room + 2 * D) * 4
            for g in range(G):
                split_query(job, job.q + ((r * job.heads) + k * G + g) * D * 4, halves + 2 * g * D * 4)
            for p in range(others):
                page = i32(pages, p)
                if page < 0 or page >= job.page_count:
                    page = 0
                low = job.bounds + (page * 2 * K + k) * D * 2
                for g in range(G):
                    set_f32(logits, g * room + p, bound_of(halves + 2 * g * D * 4, low, low + K * D * 2))
            for p in range(0, room, LANES):
                store(shares, p, splat(ZERO))
            for g in range(G):
                for p in range(others, room):
                    set_f32(logits, g * room + p, NEVER)
                softmax_into(logits + g * room * 4, others, shares)
            least = threshold(shares, others, most - 1)
            equal = most - 1
            for p in range(others):
                equal -= i32(shares, p) > least
            at = 0
            for p in range(others):
                share = i32(shares, p)
                if share > least or (share == least and equal > 0):
                    equal -= share == least
                    set_i32(out, at, i32(pages, p))
                    at += 1
            set_i32(out, most - 1, i32(pages, others))
            free(logits)

    return Kernel(kernel_table.CHOOSE_PAGES, CHOOSE_JOB, prepare, block, nothing)
