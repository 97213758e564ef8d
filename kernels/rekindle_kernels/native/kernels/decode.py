"""Decode attention that reads pages where they lie: one query per row, each key and value read once, online softmax.

Work is divided by (row, stretch of keys, kv head). A stretch's logits are computed first, then its softmax, then the
weighted sum of its values; rows of several stretches are merged at the end.

Axes: R rows, H query heads, K kv heads, G = H/K, D head size, P pages, S page size, W page-table width.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.kernels.attention_job import (
    FIELDS,
    MASKED,
    NUMBERS,
    PLAIN,
    StoredHeads,
    addresses,
    describer,
    length_of,
    sink_of,
    vector_of,
)
from rekindle_kernels.native.kernels.rotation import rotator
from rekindle_kernels.native.language.handler import Kernel, job_layout
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import f32, free, i32, malloc, prefetch, set_f32, set_i32
from rekindle_kernels.native.language.vector import (
    LANES,
    add,
    between,
    divide,
    larger,
    largest,
    load_f32,
    multiply,
    multiply_add,
    splat,
    store,
    store_four,
    subtract,
    total,
)
from rekindle_kernels.native.language.vector_math import exp, exp_of_one, tanh

RECORD = 2  # numbers of a partial result in addition to the values: the largest logit, the sum of weights
ZERO, ONE = np.float32(0), np.float32(1)

JOB = job_layout(
    "decode",
    {
        **FIELDS,
        "partial": "[pieces, heads, head_dim + RECORD], of rows that are cut into several pieces",
        "work": "int32 [pieces, 2]: the row and the first key of each piece",
        "keys": "of a piece",
    },
    f"{PLAIN} pieces",
    numbers=NUMBERS,
)


@inline
def first_key(job: Any, length: int) -> int:
    """Return the first key that the window of a row's query shows."""
    return max(0, length - job.window) if job.window > 0 else 0


@inline
def list_pieces(job: Any, rows: int) -> None:
    """Note where every piece begins; rows of one piece after another."""
    pieces = 0
    for r in range(rows):
        length = length_of(job, r)
        first = first_key(job, length)
        for piece in range((length - first + job.keys - 1) // job.keys):
            set_i32(job.work, 2 * pieces, r)
            set_i32(job.work, 2 * pieces + 1, first + piece * job.keys)
            pieces += 1
    job.pieces = pieces


# The two products of decode attention, queries with keys and weights with values, and the softmax between them.
#
# Each key and value is read where it lies in its page. The page that follows is prefetched meanwhile: the processor's
# own prefetcher stops at every page.
#
# Axes: G query heads of a kv head, K kv heads, D head size, S page size.


@inline
def weights_of(job: Any, count: int, logits: int) -> tuple[float, float]:
    """Turn the logits of one head into weights; the largest logit and the sum of the weights."""
    scale, cap = job.scale, job.soft_cap
    until = (count + LANES - 1) // LANES * LANES
    for t in range(count, until):
        set_f32(logits, t, MASKED)
    highest, weights = splat(MASKED), splat(ZERO)
    for t in range(0, until, LANES):
        x = multiply(load_f32(logits, t), splat(scale))
        if cap > ZERO:
            x = multiply(tanh(divide(x, splat(cap))), splat(cap))
        store(logits, t, x)
        highest = larger(highest, x)
    if until > count:  # scaled and capped like the others
        store(logits, until - LANES, between(load_f32(logits, until - LANES), 0, count % LANES, MASKED))
        if cap > ZERO:
            highest = splat(MASKED)
            for t in range(0, until, LANES):
                highest = larger(highest, load_f32(logits, t))
    top = largest(highest)
    for t in range(0, until, LANES):
        x = exp(subtract(load_f32(logits, t), splat(top)))
        store(logits, t, x)
        weights = add(weights, x)
    return top, total(weights)


@inline
def scale_values(job: Any, r: int, k: int, begin: int, end: int, weights: int) -> None:
    """Multiply the weights of one head by the scales of the values [begin, end), page by page."""
    key = begin
    while key < end:
        until = min(end, (key // job.page_size + 1) * job.page_size)
        scales, here = job.scales + vector_of(job, r, key, 1, k) * 4, weights + (key - begin) * 4
        for t in range(until - key):
            set_f32(here, t, f32(here, t) * f32(scales, t))
        key = until


def fetcher(length: int) -> Any:
    """Return `fetch(vector)`: have one vector of a page, of so many bytes, brought into the cache."""

    @inline
    def fetch(vector: int) -> None:
        for line in range(0, length, 64):
            prefetch(vector + line)

    return fetch


def logits_function(stored: StoredHeads) -> Any:
    """Return `logits_of(job, r, k, begin, end, q, logits)`: products of the queries of kv head k, at q, with the keys
    [begin, end)."""
    load, D, scaled, KEY = stored.keys.load, stored.head_dim, stored.scaled, stored.key_bytes
    VECTORS, fetch, (key_at, value_at) = D // LANES, fetcher(stored.key_bytes), addresses(stored)

    @inline
    def dot(q: int, key: int) -> float:
        a = splat(ZERO)
        for i in range(VECTORS):
            a = multiply_add(load_f32(q, i * LANES), load(key, i * LANES), a)
        return total(a)

    @inline
    def two_dots(q: int, key: int) -> tuple[float, float]:
        a = b = splat(ZERO)
        for i in range(VECTORS):
            one = load(key, i * LANES)
            a = multiply_add(load_f32(q, i * LANES), one, a)
            b = multiply_add(load_f32(q, D + i * LANES), one, b)
        return total(a), total(b)

    @inline
    def logits_of(job: Any, r: int, k: int, begin: int, end: int, q: int, logits: int) -> None:
        """Plain products of queries and keys, [G, keys]."""
        S, keys = job.page_size, job.keys
        G = job.heads // job.kv_heads
        key = begin
        while key < end:  # page by page; a division per key would cost as much as its products
            page, first = key_at(job, r, key, k), vector_of(job, r, key, 0, k)
            until = min(end, (key // S + 1) * S)
            following = key_at(job, r, until, k) if until < end else value_at(job, r, begin, k)
            for t in range(until - key):
                vectors = page + t * KEY
                fetch(following + t * KEY)
                factor = f32(job.scales, first + t) if scaled else ONE
                at = logits + (key - begin + t) * 4
                g = 0
                while g + 2 <= G:
                    a, b = two_dots(q + g * D * 4, vectors)
                    set_f32(at, g * keys, a * factor)
                    set_f32(at, (g + 1) * keys, b * factor)
                    g += 2
                if g < G:
                    set_f32(at, g * keys, dot(q + g * D * 4, vectors) * factor)
            key = until

    return logits_of


def value_sums(stored: StoredHeads) -> Any:
    """Return `weigh_heads(job, r, k, begin, end, weights, out, step)`: sums of the values [begin, end) for each
    query head of kv head k, by weights [G, keys], into rows `step` numbers apart."""
    load, D, VALUE = stored.values.load, stored.head_dim, stored.value_bytes
    fetch, has_four_vectors, (_, value_at) = fetcher(VALUE), D % (4 * LANES) == 0, addresses(stored)

    def one_head(wide: bool) -> Any:
        """Return `weigh(job, r, k, begin, end, weights, column, out)`: one vector of the sum of values for one head, or
        four at once if `wide`."""

        @inline
        def weigh(job: Any, r: int, k: int, begin: int, end: int, weights: int, column: int, out: int) -> None:
            S = job.page_size
            a = b = c = d = splat(ZERO)
            key = begin
            while key < end:
                page = value_at(job, r, key, k)
                until = min(end, (key // S + 1) * S)
                following = value_at(job, r, min(until, end - 1), k)
                for t in range(until - key):
                    fetch(following + t * VALUE)
                    weight, value = splat(f32(weights, key - begin + t)), page + t * VALUE
                    a = multiply_add(weight, load(value, column), a)
                    if wide:
                        b = multiply_add(weight, load(value, column + LANES), b)
                        c = multiply_add(weight, load(value, column + 2 * LANES), c)
                        d = multiply_add(weight, load(value, column + 3 * LANES), d)
                key = until
            if wide:
                store_four(out, column, a, b, c, d)
            else:
                store(out, column, a)

        return weigh

    weigh, weigh_wide = one_head(False), one_head(True)

    @inline
    def weigh_two(
        job: Any, r: int, k: int, begin: int, end: int, weights: int, next_head: int, column: int, out: int, step: int
    ) -> None:
        """Four vectors of two heads at once, which share the widening of the values."""
        S = job.page_size
        a = b = c = d = e = f = g = h = splat(ZERO)
        key = begin
        while key < end:
            page = value_at(job, r, key, k)
            until = min(end, (key // S + 1) * S)
            following = value_at(job, r, min(until, end - 1), k)
            for t in range(until - key):
                fetch(following + t * VALUE)
                one, value = splat(f32(weights, key - begin + t)), page + t * VALUE
                two = splat(f32(weights, next_head + key - begin + t))
                v = load(value, column)
                a, e = multiply_add(one, v, a), multiply_add(two, v, e)
                v = load(value, column + LANES)
                b, f = multiply_add(one, v, b), multiply_add(two, v, f)
                v = load(value, column + 2 * LANES)
                c, g = multiply_add(one, v, c), multiply_add(two, v, g)
                v = load(value, column + 3 * LANES)
                d, h = multiply_add(one, v, d), multiply_add(two, v, h)
            key = until
        store_four(out, column, a, b, c, d)
        store_four(out, step + column, e, f, g, h)

    @inline
    def weigh_heads(job: Any, r: int, k: int, begin: int, end: int, weights: int, out: int, step: int) -> None:
        G, keys = job.heads // job.kv_heads, job.keys
        g = 0
        while g < G:
            mine, here = weights + g * keys * 4, out + g * step * 4
            if has_four_vectors and g + 2 <= G:
                for column in range(0, D, 4 * LANES):
                    weigh_two(job, r, k, begin, end, mine, keys, column, here, step)
                g += 2
                continue
            if has_four_vectors:
                for column in range(0, D, 4 * LANES):
                    weigh_wide(job, r, k, begin, end, mine, column, here)
            else:
                for column in range(0, D, LANES):
                    weigh(job, r, k, begin, end, mine, column, here)
            g += 1

    return weigh_heads


def preparer(stored: StoredHeads) -> Any:
    """Return `prepare(frame, job, threads)` for heads of that size."""
    D, describe = stored.head_dim, describer(stored)

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        describe(frame, job)
        if frame.settings.apart != 0:
            job.tables = job.kv_heads
            job.apart = 1
        rows, H = frame.settings.decode_rows, job.heads
        pieces = 0
        for r in range(rows):
            length = length_of(job, r)
            pieces += max(0, length - first_key(job, length) + job.keys - 1) // job.keys
            if length <= 0:
                for at in range(r * H * D, (r + 1) * H * D):
                    set_f32(job.out, at, ZERO)
        job.partial = malloc(pieces * (H * (D + RECORD) + 2) * 4)
        job.work = job.partial + pieces * H * (D + RECORD) * 4
        list_pieces(job, rows)
        return pieces * job.kv_heads

    return prepare


def scaler(D: int) -> Any:
    """Return `divide_by_weights(out, top, weights, sink)`: a sum of values becomes their mean, the sink's weight
    included."""

    @inline
    def divide_by_weights(out: int, top: float, weights: float, sink: float) -> None:
        if sink > top:
            weights = weights * exp_of_one(top - sink) + ONE
            factor = exp_of_one(top - sink) / weights
        else:
            factor = ONE / (weights + exp_of_one(sink - top))
        for d in range(0, D, LANES):
            store(out, d, multiply(load_f32(out, d), splat(factor)))

    return divide_by_weights


def merger(D: int) -> Any:
    """Return `merge(job, r, h, piece, after)`: one head of row r from the partial results of the pieces [piece,
    after)."""

    @inline
    def merge(job: Any, r: int, h: int, piece: int, after: int) -> None:
        H = job.heads
        out = job.out + (r * H + h) * D * 4
        top = sink_of(job, h)
        for p in range(piece, after):
            top = max(top, f32(job.partial + (p * H + h) * (D + RECORD) * 4, D))
        weights = exp_of_one(sink_of(job, h) - top)
        for d in range(D):
            set_f32(out, d, ZERO)
        for p in range(piece, after):
            record = job.partial + (p * H + h) * (D + RECORD) * 4
            factor = exp_of_one(f32(record, D) - top)
            weights += f32(record, D + 1) * factor
            for d in range(D):
                set_f32(out, d, f32(out, d) + f32(record, d) * factor)
        for d in range(D):
            set_f32(out, d, f32(out, d) / weights)

    return merge


def kernel(stored: StoredHeads) -> Kernel:
    """Attention of one query per row over the row's pages. Rows from the setting `decode_rows` on are left alone."""
    D, scaled, packed = stored.head_dim, stored.scaled, stored.packed
    logits_of, weigh_heads = logits_function(stored), value_sums(stored)
    prepare, divide_by_weights, merge = preparer(stored), scaler(D), merger(D)
    rotate = rotator(D)

    @jit
    def block(job: Any, index: int) -> None:
        """One piece of a row for one kv head."""
        K, keys = job.kv_heads, job.keys
        G = job.heads // K
        piece, k = index // K, index % K
        r, begin = i32(job.work, 2 * piece), i32(job.work, 2 * piece + 1)
        length = length_of(job, r)
        end = min(length, begin + keys)
        logits = malloc(G * (keys + 2 + D) * 4)
        tops = logits + G * keys * 4
        q = job.q + (r * job.heads + k * G) * D * 4
        if packed:
            rotated = tops + 2 * G * 4
            for g in range(G):
                rotate(q + g * D * 4, rotated + g * D * 4)
            q = rotated
        logits_of(job, r, k, begin, end, q, logits)
        whole = length - first_key(job, length) <= keys
        record = job.partial + (piece * job.heads + k * G) * (D + RECORD) * 4
        out = job.out + (r * job.heads + k * G) * D * 4 if whole else record
        step = D if whole else D + RECORD
        for g in range(G):
            mine = logits + g * keys * 4
            top, weights = weights_of(job, end - begin, mine)
            if scaled:
                scale_values(job, r, k, begin, end, mine)
            # The sum of the values is divided by this later: it is kept next to the logits.
            set_f32(tops, 2 * g, top)
            set_f32(tops, 2 * g + 1, weights)
        weigh_heads(job, r, k, begin, end, logits, out, step)
        for g in range(G):
            top, weights, here = f32(tops, 2 * g), f32(tops, 2 * g + 1), out + g * step * 4
            if whole:
                divide_by_weights(here, top, weights, sink_of(job, k * G + g))
                if packed:
                    rotate(here, here)
            else:
                set_f32(here, D, top)
                set_f32(here, D + 1, weights)
        free(logits)

    @jit
    def finish(job: Any) -> None:
        """Merge the rows of several pieces, which follow each other."""
        H, pieces = job.heads, job.pieces
        piece = 0
        while piece < pieces:
            r, after = i32(job.work, 2 * piece), piece + 1
            while after < pieces and i32(job.work, 2 * after) == r:
                after += 1
            if after > piece + 1:
                for h in range(H):
                    merge(job, r, h, piece, after)
                    if packed:
                        rotate(job.out + (r * H + h) * D * 4, job.out + (r * H + h) * D * 4)
            piece = after
        free(job.partial)

    table = kernel_table.DECODE_PACKED if packed else kernel_table.DECODE
    return Kernel(table, JOB, prepare, block, finish)
