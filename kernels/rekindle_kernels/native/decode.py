"""Decode attention that reads pages where they lie: one query per row, each key and value read once, online softmax.

Work is divided by (row, stretch of keys, kv head). A stretch's logits are computed first, then its softmax, then the
weighted sum of its values; rows of several stretches are merged at the end.

Axes: R rows, H query heads, K kv heads, G = H/K, D head size, P pages, S page size, W page-table width.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native.exponential import exp, exp_of_one, tanh
from rekindle_kernels.native.memory import f32, free, i32, malloc, prefetch, set_f32, set_i32
from rekindle_kernels.native.target import Kernel, dim, field, inline, jit, operand, result, set_field
from rekindle_kernels.native.vector import (
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

RECORD = 2  # numbers of a partial result beside the values: the largest logit, the sum of weights

ZERO, ONE, MASKED = np.float32(0), np.float32(1), np.float32(-1e30)

# Fields of a job.
Q, PAGES, SCALES, TABLE, LENS, SINKS, NUMBERS, WINDOW, SINKED, OUT, PARTIAL, WORK = range(12)
HEADS, KV_HEADS, PAGE_SIZE, WIDTH, KEYS, PIECES = range(12, 18)


def kernel(name: str, load: Any, size: int, D: int, scaled: bool) -> Kernel:
    """`(q [T, H, D] float32, pages [P, 2, K, S, D], scales [P, 2, K, S], table [R, W], lens [R], sinks [H], numbers,
    rules) -> [T, H, D]`, for pages that `load` widens. `numbers` are scale and soft cap (0: none), `rules`
    R, the sliding window (0: none), whether there are sinks, and the keys of a stretch. Rows from R on are left alone.
    """
    VECTORS, WIDE = D // LANES, D % (4 * LANES) == 0

    @jit
    def prepare(frame: int, job: int, threads: int) -> int:
        H, K, W = dim(frame, 0, 1), dim(frame, 1, 2), dim(frame, 3, 1)
        for index in range(7):
            set_field(job, Q + index, operand(frame, index))
        rules = operand(frame, 7)
        R, keys = i32(rules, 0), i32(rules, 3)
        set_field(job, WINDOW, i32(rules, 1))
        set_field(job, SINKED, i32(rules, 2))
        set_field(job, OUT, result(frame, 0))
        set_field(job, HEADS, H)
        set_field(job, KV_HEADS, K)
        set_field(job, PAGE_SIZE, dim(frame, 1, 3))
        set_field(job, WIDTH, W)
        set_field(job, KEYS, keys)
        pieces = 0
        for r in range(R):
            length = i32(operand(frame, 4), r)
            pieces += max(0, length - first_key(job, length) + keys - 1) // keys
        work = malloc(pieces * (H * (D + RECORD) + 2) * 4)
        set_field(job, PARTIAL, work)
        work = work + pieces * H * (D + RECORD) * 4
        set_field(job, WORK, work)
        pieces = 0
        for r in range(R):
            length = i32(operand(frame, 4), r)
            if length <= 0:
                for at in range(r * H * D, (r + 1) * H * D):
                    set_f32(result(frame, 0), at, ZERO)
            first = first_key(job, length)
            for piece in range((length - first + keys - 1) // keys):
                set_i32(work, 2 * pieces, r)
                set_i32(work, 2 * pieces + 1, first + piece * keys)
                pieces += 1
        set_field(job, PIECES, pieces)
        return pieces * K

    @inline
    def first_key(job: int, length: int) -> int:
        window = field(job, WINDOW)
        return max(0, length - window) if window > 0 else 0

    @inline
    def number(job: int, r: int, key: int, part: int, k: int) -> int:
        """Of the vector of `key`, counted through all pages: keys are part 0, values part 1."""
        S, K = field(job, PAGE_SIZE), field(job, KV_HEADS)
        page = i32(field(job, TABLE), r * field(job, WIDTH) + key // S)
        return ((page * 2 + part) * K + k) * S + key % S

    @inline
    def fetch(vectors: int) -> None:
        """Have one vector brought into the cache: the processor's own prefetcher stops at every page."""
        for line in range(0, D * size, 64):
            prefetch(vectors + line)

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
    def logits_of(job: int, r: int, k: int, begin: int, end: int, logits: int) -> None:
        """Plain products of queries and keys, [G, keys]."""
        S, keys = field(job, PAGE_SIZE), field(job, KEYS)
        G = field(job, HEADS) // field(job, KV_HEADS)
        q = field(job, Q) + (r * field(job, HEADS) + k * G) * D * 4
        key = begin
        while key < end:  # page by page; a division per key would cost as much as its products
            first = number(job, r, key, 0, k)
            until = min(end, (key // S + 1) * S)
            following = number(job, r, until, 0, k) if until < end else number(job, r, begin, 1, k)
            for t in range(until - key):
                vectors = field(job, PAGES) + (first + t) * D * size
                fetch(field(job, PAGES) + (following + t) * D * size)
                factor = f32(field(job, SCALES), first + t) if scaled else ONE
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

    @inline
    def weights_of(job: int, count: int, logits: int) -> tuple[float, float]:
        """Logits of one head become weights; their largest logit and their sum."""
        scale, cap = f32(field(job, NUMBERS), 0), f32(field(job, NUMBERS), 1)
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
    def scale_values(job: int, r: int, k: int, begin: int, end: int, logits: int) -> None:
        for t in range(begin, end):
            factor = f32(field(job, SCALES), number(job, r, t, 1, k))
            set_f32(logits, t - begin, f32(logits, t - begin) * factor)

    @inline
    def weigh(job: int, r: int, k: int, begin: int, end: int, weights: int, column: int, out: int) -> None:
        """One vector of the sum of values, for one head."""
        S = field(job, PAGE_SIZE)
        a = splat(ZERO)
        key = begin
        while key < end:
            values = field(job, PAGES) + number(job, r, key, 1, k) * D * size
            until = min(end, (key // S + 1) * S)
            following = field(job, PAGES) + number(job, r, min(until, end - 1), 1, k) * D * size
            for t in range(until - key):
                fetch(following + t * D * size)
                a = multiply_add(splat(f32(weights, key - begin + t)), load(values, t * D + column), a)
            key = until
        store(out, column, a)

    @inline
    def weigh_wide(job: int, r: int, k: int, begin: int, end: int, weights: int, column: int, out: int) -> None:
        """Four vectors at once."""
        S = field(job, PAGE_SIZE)
        a = b = c = d = splat(ZERO)
        key = begin
        while key < end:
            values = field(job, PAGES) + number(job, r, key, 1, k) * D * size
            until = min(end, (key // S + 1) * S)
            following = field(job, PAGES) + number(job, r, min(until, end - 1), 1, k) * D * size
            for t in range(until - key):
                fetch(following + t * D * size)
                weight, at = splat(f32(weights, key - begin + t)), t * D + column
                a = multiply_add(weight, load(values, at), a)
                b = multiply_add(weight, load(values, at + LANES), b)
                c = multiply_add(weight, load(values, at + 2 * LANES), c)
                d = multiply_add(weight, load(values, at + 3 * LANES), d)
            key = until
        store_four(out, column, a, b, c, d)

    @inline
    def weigh_two(
        job: int, r: int, k: int, begin: int, end: int, weights: int, next_head: int, column: int, out: int, step: int
    ) -> None:
        """Four vectors of two heads at once, which share the widening of the values."""
        S = field(job, PAGE_SIZE)
        a = b = c = d = e = f = g = h = splat(ZERO)
        key = begin
        while key < end:
            values = field(job, PAGES) + number(job, r, key, 1, k) * D * size
            until = min(end, (key // S + 1) * S)
            following = field(job, PAGES) + number(job, r, min(until, end - 1), 1, k) * D * size
            for t in range(until - key):
                fetch(following + t * D * size)
                one, at = splat(f32(weights, key - begin + t)), t * D + column
                two = splat(f32(weights, next_head + key - begin + t))
                v = load(values, at)
                a, e = multiply_add(one, v, a), multiply_add(two, v, e)
                v = load(values, at + LANES)
                b, f = multiply_add(one, v, b), multiply_add(two, v, f)
                v = load(values, at + 2 * LANES)
                c, g = multiply_add(one, v, c), multiply_add(two, v, g)
                v = load(values, at + 3 * LANES)
                d, h = multiply_add(one, v, d), multiply_add(two, v, h)
            key = until
        store_four(out, column, a, b, c, d)
        store_four(out, step + column, e, f, g, h)

    @inline
    def sink_of(job: int, h: int) -> float:
        return f32(field(job, SINKS), h) if field(job, SINKED) > 0 else MASKED

    @jit
    def block(job: int, index: int) -> None:
        K, keys = field(job, KV_HEADS), field(job, KEYS)
        G = field(job, HEADS) // K
        piece, k = index // K, index % K
        r, begin = i32(field(job, WORK), 2 * piece), i32(field(job, WORK), 2 * piece + 1)
        length = i32(field(job, LENS), r)
        end = min(length, begin + keys)
        logits = malloc(G * (keys + 2) * 4)
        tops = logits + G * keys * 4
        logits_of(job, r, k, begin, end, logits)
        whole = length - first_key(job, length) <= keys
        record = field(job, PARTIAL) + (piece * field(job, HEADS) + k * G) * (D + RECORD) * 4
        out = field(job, OUT) + (r * field(job, HEADS) + k * G) * D * 4 if whole else record
        step = D if whole else D + RECORD
        for g in range(G):
            mine = logits + g * keys * 4
            top, weights = weights_of(job, end - begin, mine)
            if scaled:
                scale_values(job, r, k, begin, end, mine)
            # What the values are divided by, once they are summed: kept beside the logits.
            set_f32(tops, 2 * g, top)
            set_f32(tops, 2 * g + 1, weights)
        g = 0
        while g < G:
            mine, here = logits + g * keys * 4, out + g * step * 4
            if WIDE and g + 2 <= G:
                for column in range(0, D, 4 * LANES):
                    weigh_two(job, r, k, begin, end, mine, keys, column, here, step)
                g += 2
                continue
            if WIDE:
                for column in range(0, D, 4 * LANES):
                    weigh_wide(job, r, k, begin, end, mine, column, here)
            else:
                for column in range(0, D, LANES):
                    weigh(job, r, k, begin, end, mine, column, here)
            g += 1
        for g in range(G):
            top, weights, here = f32(tops, 2 * g), f32(tops, 2 * g + 1), out + g * step * 4
            if whole:
                sink = sink_of(job, k * G + g)
                if sink > top:
                    weights = weights * exp_of_one(top - sink) + ONE
                    factor = exp_of_one(top - sink) / weights
                else:
                    factor = ONE / (weights + exp_of_one(sink - top))
                for d in range(0, D, LANES):
                    store(here, d, multiply(load_f32(here, d), splat(factor)))
            else:
                set_f32(here, D, top)
                set_f32(here, D + 1, weights)
        free(logits)

    @jit
    def finish(job: int) -> None:
        """Merge the rows of several pieces, which follow each other."""
        H, pieces = field(job, HEADS), field(job, PIECES)
        piece = 0
        while piece < pieces:
            r, after = i32(field(job, WORK), 2 * piece), piece + 1
            while after < pieces and i32(field(job, WORK), 2 * after) == r:
                after += 1
            if after > piece + 1:
                for h in range(H):
                    merge(job, r, h, piece, after)
            piece = after
        free(field(job, PARTIAL))

    @inline
    def merge(job: int, r: int, h: int, piece: int, after: int) -> None:
        H = field(job, HEADS)
        out = field(job, OUT) + (r * H + h) * D * 4
        top = sink_of(job, h)
        for p in range(piece, after):
            top = max(top, f32(field(job, PARTIAL) + (p * H + h) * (D + RECORD) * 4, D))
        weights = exp_of_one(sink_of(job, h) - top)
        for d in range(D):
            set_f32(out, d, ZERO)
        for p in range(piece, after):
            record = field(job, PARTIAL) + (p * H + h) * (D + RECORD) * 4
            factor = exp_of_one(f32(record, D) - top)
            weights += f32(record, D + 1) * factor
            for d in range(D):
                set_f32(out, d, f32(out, d) + f32(record, d) * factor)
        for d in range(D):
            set_f32(out, d, f32(out, d) / weights)

    return Kernel(name, prepare, block, finish)
