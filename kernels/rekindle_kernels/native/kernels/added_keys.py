"""Attention in both directions over blocks of keys: flash attention with tiles that fit a core's own cache.

Work is divided by (head, tile of queries). A tile of keys is turned, and one of values brought in order, once for all
queries of a tile; both products are those of `prefill_tiles`. Tiles of keys that none of four rows sees are skipped.

A head size is an argument: rows in scratch are filled up to whole vectors with zeros, which change no sum.

Axes: H heads, M queries, N keys, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.kernels.prefill import softmax_function
from rekindle_kernels.native.kernels.prefill_tiles import KEYS, products
from rekindle_kernels.native.language.dot_products import transpose
from rekindle_kernels.native.language.handler import Kernel, job_layout, nothing
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import f32, free, i32, malloc, set_f32
from rekindle_kernels.native.language.records import dim, take
from rekindle_kernels.native.language.vector import LANES, load_f32, splat, store, total

QUERIES = 128  # of a tile
ROWS = 4  # that are multiplied together
ZERO = np.float32(0)

JOB = job_layout(
    "addkeys",
    {
        "most": "[heads, queries]",
        "total": "[heads, queries]",
        "weighed": "[heads, queries, head_dim]",
        "q": "[heads, queries, head_dim]",
        "k": "[heads, keys, head_dim]",
        "v": "[heads, keys, head_dim]",
        "starts": "int32 [queries]",
        "stops": "int32 [queries]",
        "most_now": "[heads, queries]",
        "total_now": "[heads, queries]",
        "weighed_now": "[heads, queries, head_dim]",
        "padded": "numbers of a row in scratch: whole vectors",
        "tiles": "of queries",
    },
    "queries keys head_dim",
    numbers={"scale": "of scores", "soft_cap": "0: there is none"},
)


class TileScratch(NamedTuple):
    """Addresses of what a tile keeps while it passes over the keys; P padded numbers of a row."""

    q: int  # [QUERIES, P]
    out: int  # [QUERIES, P]
    sums: int  # of weights, [QUERIES, LANES]
    tops: int  # the largest scores, [QUERIES]
    scores: int  # [ROWS, KEYS]
    rows: int  # [KEYS, P], of keys
    keys: int  # [P, KEYS]
    values: int  # [KEYS, P]


@inline
def scratch_of(P: int) -> TileScratch:
    """Return memory for a tile, at `q`."""
    q = malloc((QUERIES * (2 * P + LANES + 1) + ROWS * KEYS + 3 * KEYS * P) * 4)
    out, sums = q + QUERIES * P * 4, q + 2 * QUERIES * P * 4
    tops = sums + QUERIES * LANES * 4
    scores = tops + QUERIES * 4
    rows = scores + ROWS * KEYS * 4
    return TileScratch(q, out, sums, tops, scores, rows, rows + KEYS * P * 4, rows + 2 * KEYS * P * 4)


@inline
def copy_row(source: int, D: int, out: int, P: int) -> None:
    """Copy D numbers, and zeros up to P."""
    whole = D // LANES * LANES
    for d in range(0, whole, LANES):
        store(out, d, load_f32(source, d))
    if whole < P:
        store(out, whole, splat(ZERO))
        for d in range(whole, D):
            set_f32(out, d, f32(source, d))


@inline
def clear_row(out: int, P: int) -> None:
    for d in range(0, P, LANES):
        store(out, d, splat(ZERO))


@jit
def load_tile(job: Any, head: int, first: int, scratch: TileScratch) -> None:
    """Bring a tile of keys and values into scratch; those after the last are zeros."""
    D, P, N = job.head_dim, job.padded, job.keys
    for j in range(KEYS):
        at = (head * N + first + j) * D * 4
        if first + j < N:
            copy_row(job.k + at, D, scratch.rows + j * P * 4, P)
            copy_row(job.v + at, D, scratch.values + j * P * 4, P)
        else:
            clear_row(scratch.rows + j * P * 4, P)
            clear_row(scratch.values + j * P * 4, P)
    for d in range(0, P, LANES):
        for j in range(0, KEYS, LANES):
            transpose(scratch.rows + (j * P + d) * 4, P, scratch.keys + (d * KEYS + j) * 4, KEYS)


@jit
def begin(job: Any, head: int, first: int, count: int, scratch: TileScratch) -> None:
    """Bring queries and their sums so far into scratch; rows that pad them see nothing."""
    D, P = job.head_dim, job.padded
    for m in range((count + ROWS - 1) // ROWS * ROWS):
        q, out, at = scratch.q + m * P * 4, scratch.out + m * P * 4, head * job.queries + first + m
        store(scratch.sums, m * LANES, splat(ZERO))
        if m < count:
            copy_row(job.q + at * D * 4, D, q, P)
            copy_row(job.weighed + at * D * 4, D, out, P)
            set_f32(scratch.sums, m * LANES, f32(job.total, at))
            set_f32(scratch.tops, m, f32(job.most, at))
        else:
            clear_row(q, P)
            clear_row(out, P)
            set_f32(scratch.tops, m, ZERO)


@jit
def end(job: Any, head: int, first: int, count: int, scratch: TileScratch) -> None:
    """Write the sums."""
    D, P = job.head_dim, job.padded
    for m in range(count):
        at = head * job.queries + first + m
        set_f32(job.most_now, at, f32(scratch.tops, m))
        set_f32(job.total_now, at, total(load_f32(scratch.sums, m * LANES)))
        for d in range(0, D // LANES * LANES, LANES):
            store(job.weighed_now, at * D + d, load_f32(scratch.out, m * P + d))
        for d in range(D // LANES * LANES, D):
            set_f32(job.weighed_now, at * D + d, f32(scratch.out, m * P + d))


def kernel() -> Kernel:
    """Return the kernel that adds a block of keys to sums."""
    product, _, by_vector = products(paired=False)
    softmax_row = softmax_function(paired=False)

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        take(frame, job)
        job.queries = dim(frame.q, 1)
        job.keys = dim(frame.k, 1)
        job.head_dim = dim(frame.q, 2)
        job.padded = (job.head_dim + LANES - 1) // LANES * LANES
        job.tiles = (job.queries + QUERIES - 1) // QUERIES
        job.soft_cap = ZERO
        return dim(frame.q, 0) * job.tiles

    @inline
    def first_seen(job: Any, m: int, key: int) -> int:
        return min(KEYS, max(0, i32(job.starts, m) - key))

    @inline
    def end_of_seen(job: Any, m: int, key: int) -> int:
        return max(0, min(KEYS, min(i32(job.stops, m), job.keys) - key))

    @jit
    def attend(job: Any, m: int, rows: int, key: int, scratch: TileScratch, at: int) -> None:
        """Add a tile of keys to the sums of four rows of scratch; the first `rows` of them are the queries from
        m on.
        """
        P = job.padded
        seen = 0
        for i in range(rows):
            seen = max(seen, end_of_seen(job, m + i, key) - first_seen(job, m + i, key))
        if seen <= 0:
            return
        product(scratch.q + at * P * 4, P, scratch.keys, KEYS, job.head_dim, scratch.scores, KEYS, False)
        for i in range(ROWS):
            low = first_seen(job, m + i, key) if i < rows else 0
            high = end_of_seen(job, m + i, key) if i < rows else 0
            softmax_row(
                job,
                scratch.scores + i * KEYS * 4,
                low,
                max(low, high),
                scratch.tops + (at + i) * 4,
                scratch.sums + (at + i) * LANES * 4,
                scratch.out + (at + i) * P * 4,
                P,
            )
        column = 0
        while column + KEYS <= P:
            out = scratch.out + (at * P + column) * 4
            product(scratch.scores, KEYS, scratch.values + column * 4, P, KEYS, out, P, True)
            column += KEYS
        while column < P:
            out = scratch.out + (at * P + column) * 4
            by_vector(scratch.scores, KEYS, scratch.values + column * 4, P, KEYS, out, P, True)
            column += LANES

    @jit
    def block(job: Any, index: int) -> None:
        head, first = index // job.tiles, index % job.tiles * QUERIES
        count = min(QUERIES, job.queries - first)
        scratch = scratch_of(job.padded)
        begin(job, head, first, count, scratch)
        start, stop = job.keys, 0  # of the keys that any of them sees
        for m in range(first, first + count):
            if i32(job.starts, m) < i32(job.stops, m):
                start, stop = min(start, i32(job.starts, m)), max(stop, i32(job.stops, m))
        for key in range(max(0, start) // KEYS * KEYS, min(stop, job.keys), KEYS):
            load_tile(job, head, key, scratch)
            for at in range(0, count, ROWS):
                attend(job, first + at, min(ROWS, count - at), key, scratch, at)
        end(job, head, first, count, scratch)
        free(scratch.q)

    return Kernel(kernel_table.ADD_KEYS, JOB, prepare, block, nothing)
