"""Attention of prompt chunks over pages: flash attention with tiles that stay in a core's own cache.

Work is divided by (sequence, tile of queries, kv head). The queries of one kv head are the rows of a matrix; a tile of
keys is turned, a tile of values brought in order, once for all of them, and both products run in one micro-kernel of
four rows by four vectors. Tiles that no query sees are skipped.

Products are of float32, or, where pages are bfloat16 and the processor multiplies two of them in a lane, of words that
hold two: queries and weights are rounded to bfloat16 then, sums stay float32.

Axes: T tokens, H query heads, K kv heads, G = H/K, D head size, S page size, W page-table width, M rows of a tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native.exponential import exp, exp_of_one, tanh
from rekindle_kernels.native.memory import f32, free, i32, malloc, set_f32, set_i32
from rekindle_kernels.native.target import Kernel, dim, field, inline, jit, operand, result, set_field
from rekindle_kernels.native.vector import (
    LANES,
    add,
    between,
    larger,
    largest,
    load_f32,
    multiply,
    multiply_add,
    nearest,
    splat,
    store,
    store_four,
    subtract,
    total,
)
from rekindle_kernels.native.words import (
    add_pairs,
    load_interleaved,
    store_columns,
    store_rounded,
    times_power_of_two,
)

KEYS = 64  # of a tile: the four vectors of the micro-kernel
LAST = KEYS - LANES
ZERO, ONE, EIGHT, MASKED = np.float32(0), np.float32(1), np.float32(8), np.float32(-1e30)
LN_2, LOG2_E = np.float32(0.6931471805599453), np.float32(1.4426950408889634)
# 2^x on ±1/2, highest power first: ln(2)^n / n!
E4, E3, E2 = np.float32(9.6181291e-3), np.float32(5.5504109e-2), np.float32(2.4022651e-1)


@inline
def add_products(a: Any, b: Any, c: Any) -> Any:
    """a + b · c in every lane."""
    return multiply_add(b, c, a)


@inline
def power(x: Any) -> Any:
    """2 to the power of a vector, to one part in 20,000: enough for weights that are rounded to eight bits."""
    steps = nearest(x)
    rest = subtract(x, steps)
    curve = multiply_add(splat(E4), rest, splat(E3))
    curve = multiply_add(curve, rest, splat(E2))
    curve = multiply_add(curve, rest, splat(LN_2))
    return times_power_of_two(multiply_add(curve, rest, splat(ONE)), steps)


# Fields of a job.
Q, PAGES, SCALES, TABLE, LENS, SINKS, NUMBERS, CU = range(8)
WINDOW, SINKED, QUERIES, OUT, WORK, HEADS, KV_HEADS, PAGE_SIZE, WIDTH, TILES = range(8, 18)


def kernel(name: str, read: Any, size: int, D: int, scaled: bool, paired: bool) -> Kernel:
    """`(q [T, H, D] float32, pages [P, 2, K, S, D], scales [P, 2, K, S], table [N, W], lens [N], sinks [H], numbers,
    cu [N + 1], count [], rules, out) -> out [T, H, D]`, for pages that `read` widens. `numbers` are scale
    and soft cap (0: none), `rules` how many rows are others', the sliding window (0: none), whether there are sinks,
    and the queries of a tile. What is others' comes first in q, table, lens and out. `paired`: pages are bfloat16, and
    multiplied so.
    """
    elements = 2 if paired else 1  # of a word
    words, key_words = D // elements, KEYS // elements  # of a query, of a row of weights
    add_product = add_pairs if paired else add_products

    @jit
    def prepare(frame: int, job: int, threads: int) -> int:
        H, K, W = dim(frame, 0, 1), dim(frame, 1, 2), dim(frame, 3, 1)
        for index in range(8):
            set_field(job, Q + index, operand(frame, index))
        count, rules, cu = i32(operand(frame, 8), 0), operand(frame, 9), operand(frame, 7)
        others, queries = i32(rules, 0), i32(rules, 3)
        T, out = dim(frame, 0, 0) - others, result(frame, 0) + others * H * D * 4
        set_field(job, Q, operand(frame, 0) + others * H * D * 4)
        set_field(job, TABLE, operand(frame, 3) + others * W * 4)
        set_field(job, LENS, operand(frame, 4) + others * 4)
        set_field(job, WINDOW, i32(rules, 1))
        set_field(job, SINKED, i32(rules, 2))
        set_field(job, QUERIES, queries)
        set_field(job, OUT, out)
        set_field(job, HEADS, H)
        set_field(job, KV_HEADS, K)
        set_field(job, PAGE_SIZE, dim(frame, 1, 3))
        set_field(job, WIDTH, W)
        for at in range(i32(cu, count) * H * D, T * H * D):
            set_f32(out, at, ZERO)
        tiles = 0
        for s in range(count):
            tiles += (i32(cu, s + 1) - i32(cu, s) + queries - 1) // queries
        work = malloc(2 * tiles * 4)
        set_field(job, WORK, work)
        tiles = 0
        for s in range(count):
            for number in range((i32(cu, s + 1) - i32(cu, s) + queries - 1) // queries):
                set_i32(work, 2 * tiles, s)
                set_i32(work, 2 * tiles + 1, number * queries)
                tiles += 1
        set_field(job, TILES, tiles)
        return tiles * K

    @inline
    def address(job: int, s: int, k: int, t: int) -> int:
        """Where the key of position t is, in tokens of a head; its value is K · S further."""
        S, K = field(job, PAGE_SIZE), field(job, KV_HEADS)
        return (i32(field(job, TABLE), s * field(job, WIDTH) + t // S) * 2 * K + k) * S + t % S

    @inline
    def load_tile(job: int, s: int, k: int, begin: int, until: int, keys: int, values: int) -> None:
        """Keys [D, KEYS] and values [KEYS, D] of one tile as float32, zero from `until` on."""
        pages = field(job, PAGES)
        for j in range(KEYS):
            if begin + j < until:
                key = address(job, s, k, begin + j)
                value = key + field(job, KV_HEADS) * field(job, PAGE_SIZE)
                key_scale = f32(field(job, SCALES), key) if scaled else ONE
                value_scale = f32(field(job, SCALES), value) if scaled else ONE
                for d in range(D):
                    set_f32(values, j * D + d, read(pages + value * D * size, d) * value_scale)
                for d in range(D):
                    set_f32(keys, d * KEYS + j, read(pages + key * D * size, d) * key_scale)
            else:
                for d in range(D):
                    set_f32(values, j * D + d, ZERO)
                    set_f32(keys, d * KEYS + j, ZERO)

    @inline
    def load_pairs(job: int, s: int, k: int, begin: int, until: int, keys: int, values: int) -> None:
        """Keys as words [D / 2, KEYS] of two numbers of a key, values as words [KEYS / 2, D] of two values."""
        pages, heads = field(job, PAGES), field(job, KV_HEADS) * field(job, PAGE_SIZE) * D * 2
        nothing_there = values + KEYS * D * 2  # behind the values: a row of zeros
        for d in range(0, D, 2 * LANES):
            store(nothing_there, d // 2, splat(ZERO))
        for j in range(0, KEYS, 4):
            t = begin + j
            a = pages + address(job, s, k, t) * D * 2 if t < until else nothing_there
            b = pages + address(job, s, k, t + 1) * D * 2 if t + 1 < until else nothing_there
            c = pages + address(job, s, k, t + 2) * D * 2 if t + 2 < until else nothing_there
            e = pages + address(job, s, k, t + 3) * D * 2 if t + 3 < until else nothing_there
            for i in range(0, D // 2, LANES):
                store_columns(
                    keys + (i * KEYS + j) * 4, KEYS, load_f32(a, i), load_f32(b, i), load_f32(c, i), load_f32(e, i)
                )
            a = a + heads if t < until else nothing_there
            b = b + heads if t + 1 < until else nothing_there
            c = c + heads if t + 2 < until else nothing_there
            e = e + heads if t + 3 < until else nothing_there
            for d in range(0, D, LANES):
                store(values, j // 2 * D + d, load_interleaved(a, b, d))
                store(values, (j // 2 + 1) * D + d, load_interleaved(c, e, d))

    load = load_pairs if paired else load_tile
    put = store_rounded if paired else store
    # Logits are kept in the unit of their exponential.
    exponential, unit = (power, LOG2_E) if paired else (exp, ONE)
    # How far they may rise above what weights are relative to: rescaling what was summed costs more than the rest of a
    # row, and a weight of 2^8 has as many bits as one of 1.
    slack = EIGHT if paired else ZERO

    @inline
    def product(a: int, a_step: int, b: int, b_step: int, depth: int, c: int, c_step: int, add: bool) -> None:
        """c (+)= a · b for four rows of a and four vectors of b; steps count floats from row to row."""
        r00 = r01 = r02 = r03 = r10 = r11 = r12 = r13 = splat(ZERO)
        r20 = r21 = r22 = r23 = r30 = r31 = r32 = r33 = splat(ZERO)
        if add:
            r00, r01, r02, r03 = (
                load_f32(c, 0), load_f32(c, LANES), load_f32(c, 2 * LANES), load_f32(c, 3 * LANES),
            )  # fmt: skip
            r10, r11, r12, r13 = (
                load_f32(c, c_step), load_f32(c, c_step + LANES), load_f32(c, c_step + 2 * LANES),
                load_f32(c, c_step + 3 * LANES),
            )  # fmt: skip
            r20, r21, r22, r23 = (
                load_f32(c, 2 * c_step), load_f32(c, 2 * c_step + LANES), load_f32(c, 2 * c_step + 2 * LANES),
                load_f32(c, 2 * c_step + 3 * LANES),
            )  # fmt: skip
            r30, r31, r32, r33 = (
                load_f32(c, 3 * c_step), load_f32(c, 3 * c_step + LANES), load_f32(c, 3 * c_step + 2 * LANES),
                load_f32(c, 3 * c_step + 3 * LANES),
            )  # fmt: skip
        for i in range(depth):
            b0, b1 = load_f32(b, i * b_step), load_f32(b, i * b_step + LANES)
            b2, b3 = load_f32(b, i * b_step + 2 * LANES), load_f32(b, i * b_step + 3 * LANES)
            x = splat(f32(a, i))
            r00, r01 = add_product(r00, b0, x), add_product(r01, b1, x)
            r02, r03 = add_product(r02, b2, x), add_product(r03, b3, x)
            x = splat(f32(a, a_step + i))
            r10, r11 = add_product(r10, b0, x), add_product(r11, b1, x)
            r12, r13 = add_product(r12, b2, x), add_product(r13, b3, x)
            x = splat(f32(a, 2 * a_step + i))
            r20, r21 = add_product(r20, b0, x), add_product(r21, b1, x)
            r22, r23 = add_product(r22, b2, x), add_product(r23, b3, x)
            x = splat(f32(a, 3 * a_step + i))
            r30, r31 = add_product(r30, b0, x), add_product(r31, b1, x)
            r32, r33 = add_product(r32, b2, x), add_product(r33, b3, x)
        store_four(c, 0, r00, r01, r02, r03)
        store_four(c, c_step, r10, r11, r12, r13)
        store_four(c, 2 * c_step, r20, r21, r22, r23)
        store_four(c, 3 * c_step, r30, r31, r32, r33)

    @inline
    def row_vector(a: int, b: int, b_step: int, depth: int, c: int) -> None:
        """c += a · b for one row and one vector: head sizes that are no multiple of four vectors."""
        x = load_f32(c, 0)
        for i in range(depth):
            x = add_product(x, load_f32(b, i * b_step), splat(f32(a, i)))
        store(c, 0, x)

    @inline
    def softmax_row(job: int, logits: int, low: int, high: int, top_at: int, sums: int, out: int) -> None:
        """Turn one row's logits into weights, keys [low, high) of the tile being seen; rescale what was summed."""
        scale, cap, before = f32(field(job, NUMBERS), 0), f32(field(job, NUMBERS), 1), f32(top_at, 0)
        a, b, c, d = load_f32(logits, 0), load_f32(logits, LANES), load_f32(logits, 2 * LANES), load_f32(logits, LAST)
        if cap > ZERO:
            factor, height = splat(scale / cap), splat(cap * unit)
            a, b = multiply(tanh(multiply(a, factor)), height), multiply(tanh(multiply(b, factor)), height)
            c, d = multiply(tanh(multiply(c, factor)), height), multiply(tanh(multiply(d, factor)), height)
        else:
            factor = splat(scale * unit)
            a, b, c, d = multiply(a, factor), multiply(b, factor), multiply(c, factor), multiply(d, factor)
        if low > 0 or high < KEYS:
            a, b = between(a, low, high, MASKED), between(b, low - LANES, high - LANES, MASKED)
            c, d = between(c, low - 2 * LANES, high - 2 * LANES, MASKED), between(d, low - LAST, high - LAST, MASKED)
        highest = largest(larger(larger(a, b), larger(c, d)))
        top = highest if highest > before + slack else before
        a, b = exponential(subtract(a, splat(top))), exponential(subtract(b, splat(top)))
        c, d = exponential(subtract(c, splat(top))), exponential(subtract(d, splat(top)))
        put(logits, 0, a)
        put(logits, LANES, b)
        put(logits, 2 * LANES, c)
        put(logits, LAST, d)
        keep = ONE
        if top > before:
            keep = exp_of_one((before - top) / unit)
            for column in range(0, D, LANES):
                store(out, column, multiply(load_f32(out, column), splat(keep)))
        set_f32(top_at, 0, top)
        store(sums, 0, multiply_add(load_f32(sums, 0), splat(keep), add(add(a, b), add(c, d))))

    @jit
    def block(job: int, index: int) -> None:
        H, K, window = field(job, HEADS), field(job, KV_HEADS), field(job, WINDOW)
        G = H // K
        # The last tiles of a sequence see the most keys: they go first, so that threads end together.
        tile, k = field(job, TILES) - 1 - index // K, index % K
        s, begin = i32(field(job, WORK), 2 * tile), i32(field(job, WORK), 2 * tile + 1)
        start = i32(field(job, CU), s)
        q_len, length = i32(field(job, CU), s + 1) - start, i32(field(job, LENS), s)
        count = min(field(job, QUERIES), q_len - begin)
        rows = count * G
        M = (rows + 3) // 4 * 4
        position = length - q_len + begin  # of the first query
        scratch = malloc((M * (2 * D + KEYS + LANES + 1) + 2 * KEYS * D) * 4)
        q, out = scratch, scratch + M * D * 4
        logits, sums = scratch + 2 * M * D * 4, scratch + M * (2 * D + KEYS) * 4
        keys = sums + M * LANES * 4
        values = keys + KEYS * D * 4
        tops = values + KEYS * D * 4
        for m in range(M):
            source = field(job, Q) + ((start + begin + m // G) * H + k * G + m % G) * D * 4
            for d in range(0, D, LANES):
                put(q, m * elements * words + d, load_f32(source, d) if m < rows else splat(ZERO))
                store(out, m * D + d, splat(ZERO))
            store(sums, m * LANES, splat(ZERO))
            set_f32(tops, m, MASKED)
        last = min(length, position + count)
        first = max(0, position - window + 1) if window > 0 else 0
        for key in range(first // KEYS * KEYS, last, KEYS):
            load(job, s, k, key, last, keys, values)
            for m in range(0, M, 4):
                if key > position + min(rows - 1, m + 3) // G:
                    continue  # none of the four sees it
                product(q + m * words * 4, words, keys, KEYS, words, logits + m * KEYS * 4, KEYS, False)
                for i in range(m, m + 4):
                    sees = position + min(i, rows - 1) // G
                    low = max(0, sees - window + 1 - key) if window > 0 else 0
                    high = max(low, min(KEYS, sees + 1 - key))
                    softmax_row(
                        job, logits + i * KEYS * 4, low, high, tops + i * 4, sums + i * LANES * 4, out + i * D * 4
                    )
                if D % KEYS == 0:
                    for column in range(0, D, KEYS):
                        at = (m * D + column) * 4
                        product(logits + m * KEYS * 4, KEYS, values + column * 4, D, key_words, out + at, D, True)
                else:
                    for i in range(m, m + 4):
                        for column in range(0, D, LANES):
                            at = (i * D + column) * 4
                            row_vector(logits + i * KEYS * 4, values + column * 4, D, key_words, out + at)
        for m in range(rows):
            h = k * G + m % G
            target = field(job, OUT) + ((start + begin + m // G) * H + h) * D * 4
            top, weights = f32(tops, m), total(load_f32(sums, m * LANES))
            keep = ONE
            if field(job, SINKED) > 0:
                sink = f32(field(job, SINKS), h) * unit
                if sink > top:
                    keep = exp_of_one((top - sink) / unit)
                    weights = weights * keep + ONE
                else:
                    weights += exp_of_one((sink - top) / unit)
            factor = keep / weights
            for d in range(D):
                set_f32(target, d, f32(out, m * D + d) * factor)
        free(scratch)

    @jit
    def finish(job: int) -> None:
        free(field(job, WORK))

    return Kernel(name, prepare, block, finish)
