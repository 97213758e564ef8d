"""A batch of rows times a bfloat16 matrix, with the instruction that multiplies pairs of bfloat16.

What `rows` does for few rows, for up to some dozens: four outputs for four rows at a time, weights read once from
memory, rows from the caches. Needs AVX512-BF16, widths that are multiples of 32 and heights that are multiples of four.
"""

from __future__ import annotations

import numpy as np

from rekindle_kernels.native.memory import prefetch
from rekindle_kernels.native.rows import AHEAD, BLOCK_BYTES
from rekindle_kernels.native.target import Kernel, dim, field, inline, jit, nothing, operand, result, set_field
from rekindle_kernels.native.vector import LANES, add_pairs, load_pairs, splat, store_totals

ZERO = np.float32(0)

# Fields of a job.
WEIGHT, X, OUT, ROWS, WIDTH, HEIGHT, PER_BLOCK = range(7)


def kernel(name: str) -> Kernel:
    """`(weight [N, K] bfloat16, x [R, K] bfloat16) -> [R, N] float32`."""

    @jit
    def prepare(frame: int, job: int, threads: int) -> int:
        N, K = dim(frame, 0, 0), dim(frame, 0, 1)
        set_field(job, WEIGHT, operand(frame, 0))
        set_field(job, X, operand(frame, 1))
        set_field(job, OUT, result(frame, 0))
        set_field(job, ROWS, dim(frame, 1, 0))
        set_field(job, WIDTH, K)
        set_field(job, HEIGHT, N)
        rounds = (N * K * 2 + threads * BLOCK_BYTES - 1) // (threads * BLOCK_BYTES)
        per_block = max(4, (N + rounds * threads - 1) // (rounds * threads) // 4 * 4)
        set_field(job, PER_BLOCK, per_block)
        return (N + per_block - 1) // per_block

    @inline
    def four_rows(weight: int, x: int, K: int, N: int, out: int) -> None:
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = splat(ZERO)
        c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = splat(ZERO)
        for k in range(0, K, 2 * LANES):
            w0, w1 = load_pairs(weight, k), load_pairs(weight, K + k)
            w2, w3 = load_pairs(weight, 2 * K + k), load_pairs(weight, 3 * K + k)
            y = load_pairs(x, k)
            a0, a1, a2, a3 = add_pairs(a0, w0, y), add_pairs(a1, w1, y), add_pairs(a2, w2, y), add_pairs(a3, w3, y)
            y = load_pairs(x, K + k)
            b0, b1, b2, b3 = add_pairs(b0, w0, y), add_pairs(b1, w1, y), add_pairs(b2, w2, y), add_pairs(b3, w3, y)
            y = load_pairs(x, 2 * K + k)
            c0, c1, c2, c3 = add_pairs(c0, w0, y), add_pairs(c1, w1, y), add_pairs(c2, w2, y), add_pairs(c3, w3, y)
            y = load_pairs(x, 3 * K + k)
            d0, d1, d2, d3 = add_pairs(d0, w0, y), add_pairs(d1, w1, y), add_pairs(d2, w2, y), add_pairs(d3, w3, y)
        store_totals(out, a0, a1, a2, a3)
        store_totals(out + 4 * N, b0, b1, b2, b3)
        store_totals(out + 8 * N, c0, c1, c2, c3)
        store_totals(out + 12 * N, d0, d1, d2, d3)

    @inline
    def one_row(weight: int, x: int, K: int, out: int) -> None:
        a = b = c = d = splat(ZERO)
        for k in range(0, K, 2 * LANES):
            y = load_pairs(x, k)
            a, b = add_pairs(a, load_pairs(weight, k), y), add_pairs(b, load_pairs(weight, K + k), y)
            c, d = add_pairs(c, load_pairs(weight, 2 * K + k), y), add_pairs(d, load_pairs(weight, 3 * K + k), y)
        store_totals(out, a, b, c, d)

    @jit
    def block(job: int, index: int) -> None:
        R, K, N, per_block = field(job, ROWS), field(job, WIDTH), field(job, HEIGHT), field(job, PER_BLOCK)
        for n in range(index * per_block, min(N, (index + 1) * per_block), 4):
            weight, out = field(job, WEIGHT) + n * K * 2, field(job, OUT) + n * 4
            for line in range(0, 4 * K * 2, 64):
                prefetch(weight + AHEAD + line)
            r = 0
            while r + 4 <= R:
                four_rows(weight, field(job, X) + r * K * 2, K, N, out + 4 * r * N)
                r += 4
            while r < R:
                one_row(weight, field(job, X) + r * K * 2, K, out + 4 * r * N)
                r += 1

    return Kernel(name, prepare, block, nothing)
