"""Few rows times a matrix, at the speed at which memory can be read.

XLA:CPU repacks a matrix for every product, which suits many rows and costs twice the reading of the matrix where there
are few. Here each weight is read once, widened in a register and multiplied with one, two or four rows; float32
throughout, whatever the weights are stored as.

135M weights in 121 matrices, 2 shared cores that read 30-35 GB/s at that time, milliseconds (interleaved, medians):

    rows                               2      8
    bfloat16   XLA                  13.4   15.1
               this file             9.0   13.3
    int8       XLA (int8 x int8)     9.0   12.2
               this file             5.7    9.5

A plain loop that the compiler vectorises reached 11.2 with 2 rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native.gating import silu
from rekindle_kernels.native.memory import LINE, f32, free, i32, malloc, prefetch, set_f32
from rekindle_kernels.native.norm import normalise
from rekindle_kernels.native.target import (
    Kernel,
    dim,
    field,
    first_unit,
    inline,
    jit,
    operand,
    result,
    result_dim,
    set_field,
)
from rekindle_kernels.native.vector import LANES, add, load_f32, multiply, multiply_add, splat, store, total

ZERO = np.float32(0)
# Bytes: the processor's own prefetcher stops at every page of memory. Asked for line by line between the products; a
# whole row's lines at once fill the queue of misses, and everything waits for it (30 GB/s instead of 37, 2 rows).
# Asked for in the order of their addresses also where two rows of weights are read in turn: 5 % less time for 2 rows.
AHEAD = 8 << 10
STEP = 8 * LANES  # weights of one row in four sums: with one sum int8 took 10 % longer, waiting for the sum before
BLOCK_BYTES = 768 << 10  # of weights. Nobody has asked for a block's first lines: 192 KiB cost 2 to 5 % of the reading

# Fields of a job. HEIGHT counts results of a row.
WEIGHT, SCALE, X, RESIDUAL, OUT, ROWS, WIDTH, HEIGHT, BLOCKS, NORMED, GATED = range(11)


def kernel(name: str, read: Any, load: Any, size: int, scaled: bool) -> Kernel:
    """`(weight [N, K], scale [N], x [R, K], residual [R, N], gap [2], norm [K], eps [1]) -> [R, N]`, all of them
    float32 but for weights that `read` widens one by one and `load` sixteen at a time, and for `gap`: how many rows
    come before, and how many are in it, which are nobody's. A result of [R, N / 2] is silu of the first outputs times
    the others, and a residual has its shape. A residual of [1, 1] and a norm of [1] are none.
    """

    @inline
    def unit(job: int) -> int:
        """A block has a whole number of these: pairs of results, or vectors."""
        return LANES if field(job, GATED) > 0 else 2

    @inline
    def units(job: int) -> int:
        return (field(job, HEIGHT) + unit(job) - 1) // unit(job)

    @jit
    def prepare(frame: int, job: int, threads: int) -> int:
        N, K, R = result_dim(frame, 0, 1), dim(frame, 0, 1), dim(frame, 2, 0)
        before, gap = i32(operand(frame, 4), 0), i32(operand(frame, 4), 1)
        R = min(before, R) if before + gap >= R else R  # a gap amid so few rows is not worth stepping over
        normed, gated = dim(frame, 5, 0) == K and K > 1, dim(frame, 0, 0) > N
        set_field(job, WEIGHT, operand(frame, 0))
        set_field(job, SCALE, operand(frame, 1))
        set_field(job, X, operand(frame, 2))
        set_field(job, NORMED, 1 if normed else 0)
        if normed:
            set_field(job, X, malloc(R * K * 4))
            for r in range(R):
                row, eps = r * K * 4, f32(operand(frame, 6), 0)
                normalise(operand(frame, 2) + row, operand(frame, 5), eps, K, field(job, X) + row)
        adds = dim(frame, 3, 0) == dim(frame, 2, 0) and dim(frame, 3, 1) == N
        set_field(job, RESIDUAL, operand(frame, 3) if adds else 0)
        set_field(job, OUT, result(frame, 0))
        set_field(job, ROWS, R)
        set_field(job, WIDTH, K)
        set_field(job, HEIGHT, N)
        set_field(job, GATED, 1 if gated else 0)
        rounds = (dim(frame, 0, 0) * K * size + threads * BLOCK_BYTES - 1) // (threads * BLOCK_BYTES)
        set_field(job, BLOCKS, min(rounds * threads, units(job)))
        return field(job, BLOCKS)

    @inline
    def ask(address: int, weights: int) -> None:
        for line in range(0, weights * size, LINE):
            prefetch(address + AHEAD + line)

    @inline
    def rest(weight: int, x: int, K: int, start: int) -> float:
        """One output of one row, from element `start` on."""
        a, end = splat(ZERO), start + (K - start) // LANES * LANES
        for k in range(start, end, LANES):
            prefetch(weight + AHEAD + k * size)
            a = multiply_add(load(weight, k), load_f32(x, k), a)
        sum_ = total(a)
        for k in range(end, K):
            sum_ += read(weight, k) * f32(x, k)
        return sum_

    @inline
    def one_row(weight: int, x: int, K: int, out: int) -> None:
        a = b = c = d = splat(ZERO)
        end = K // STEP * STEP
        for k in range(0, end, STEP):
            ask(weight + k * size, STEP)
            for i in range(k, k + STEP, 4 * LANES):
                a = multiply_add(load(weight, i), load_f32(x, i), a)
                b = multiply_add(load(weight, i + LANES), load_f32(x, i + LANES), b)
                c = multiply_add(load(weight, i + 2 * LANES), load_f32(x, i + 2 * LANES), c)
                d = multiply_add(load(weight, i + 3 * LANES), load_f32(x, i + 3 * LANES), d)
        set_f32(out, 0, total(add(add(a, b), add(c, d))) + rest(weight, x, K, end))

    @inline
    def two_by_two(weight: int, x: int, K: int, N: int, out: int) -> None:
        """Two outputs for two rows of results, N numbers apart."""
        a = b = c = d = e = f = g = h = splat(ZERO)
        below, end = weight + K * size, K // (2 * LANES) * 2 * LANES
        for k in range(0, end, 2 * LANES):
            ask(weight + 2 * k * size, 4 * LANES)
            w, v, y, z = load(weight, k), load(below, k), load_f32(x, k), load_f32(x, K + k)
            a, b = multiply_add(w, y, a), multiply_add(v, y, b)
            c, d = multiply_add(w, z, c), multiply_add(v, z, d)
            w, v = load(weight, k + LANES), load(below, k + LANES)
            y, z = load_f32(x, k + LANES), load_f32(x, K + k + LANES)
            e, f = multiply_add(w, y, e), multiply_add(v, y, f)
            g, h = multiply_add(w, z, g), multiply_add(v, z, h)
        set_f32(out, 0, total(add(a, e)) + rest(weight, x, K, end))
        set_f32(out, 1, total(add(b, f)) + rest(below, x, K, end))
        set_f32(out, N, total(add(c, g)) + rest(weight, x + 4 * K, K, end))
        set_f32(out, N + 1, total(add(d, h)) + rest(below, x + 4 * K, K, end))

    @inline
    def two_by_four(weight: int, x: int, K: int, N: int, out: int) -> None:
        """Two outputs for four rows."""
        a = b = c = d = e = f = g = h = splat(ZERO)
        below, end = weight + K * size, K // LANES * LANES
        for k in range(0, end, LANES):
            if k % (64 // size) == 0:
                ask(weight + 2 * k * size, 128 // size)
            w, v = load(weight, k), load(below, k)
            y = load_f32(x, k)
            a, b = multiply_add(w, y, a), multiply_add(v, y, b)
            y = load_f32(x, K + k)
            c, d = multiply_add(w, y, c), multiply_add(v, y, d)
            y = load_f32(x, 2 * K + k)
            e, f = multiply_add(w, y, e), multiply_add(v, y, f)
            y = load_f32(x, 3 * K + k)
            g, h = multiply_add(w, y, g), multiply_add(v, y, h)
        set_f32(out, 0, total(a) + rest(weight, x, K, end))
        set_f32(out, 1, total(b) + rest(below, x, K, end))
        set_f32(out, N, total(c) + rest(weight, x + 4 * K, K, end))
        set_f32(out, N + 1, total(d) + rest(below, x + 4 * K, K, end))
        set_f32(out, 2 * N, total(e) + rest(weight, x + 8 * K, K, end))
        set_f32(out, 2 * N + 1, total(f) + rest(below, x + 8 * K, K, end))
        set_f32(out, 3 * N, total(g) + rest(weight, x + 12 * K, K, end))
        set_f32(out, 3 * N + 1, total(h) + rest(below, x + 12 * K, K, end))

    @inline
    def for_all_rows(job: int, weight: int, count: int, out: int, N: int) -> None:
        """One output, or two, into rows of N numbers."""
        R, K, r = field(job, ROWS), field(job, WIDTH), 0
        while r < R:
            x, here = field(job, X) + 4 * r * K, out + 4 * r * N
            if count == 2 and r + 4 <= R:
                two_by_four(weight, x, K, N, here)
                r += 4
            elif count == 2 and r + 2 <= R:
                two_by_two(weight, x, K, N, here)
                r += 2
            else:
                for i in range(count):
                    one_row(weight + i * K * size, x, K, here + 4 * i)
                r += 1

    @inline
    def gated_block(job: int, begin: int, end: int) -> None:
        """The results [begin, end), a whole number of vectors: all their gates first, then their ups."""
        R, K, N, count = field(job, ROWS), field(job, WIDTH), field(job, HEIGHT), end - begin
        residual = field(job, RESIDUAL)
        ups = count * 4  # bytes behind the gates
        products = malloc(R * 2 * ups)
        for half in range(2):
            for i in range(0, count, 2):
                weight = field(job, WEIGHT) + (begin + half * N + i) * K * size
                for_all_rows(job, weight, 2, products + half * ups + i * 4, 2 * count)
        for r in range(R):
            here, out = products + r * 2 * ups, field(job, OUT) + (r * N + begin) * 4
            for i in range(0, count, LANES):
                gate, up = load_f32(here, i), load_f32(here + ups, i)
                if scaled:
                    gate = multiply(gate, load_f32(field(job, SCALE), begin + i))
                    up = multiply(up, load_f32(field(job, SCALE), N + begin + i))
                y = multiply(silu(gate), up)
                if residual > 0:
                    y = add(y, load_f32(residual, r * N + begin + i))
                store(out, i, y)
        free(products)

    @jit
    def block(job: int, index: int) -> None:
        R, N, scale, residual = field(job, ROWS), field(job, HEIGHT), field(job, SCALE), field(job, RESIDUAL)
        begin = first_unit(index, field(job, BLOCKS), units(job)) * unit(job)
        end = min(N, first_unit(index + 1, field(job, BLOCKS), units(job)) * unit(job))
        if field(job, GATED) > 0:
            gated_block(job, begin, end)
            return
        for n in range(begin, end, 2):
            count, out = min(2, end - n), field(job, OUT) + n * 4
            for_all_rows(job, field(job, WEIGHT) + n * field(job, WIDTH) * size, count, out, N)
            for r in range(R):
                for i in range(count):
                    y = f32(out, r * N + i)
                    if scaled:
                        y = y * f32(scale, n + i)
                    if residual > 0:
                        y = y + f32(residual, r * N + n + i)
                    set_f32(out, r * N + i, y)

    @jit
    def finish(job: int) -> None:
        if field(job, NORMED) > 0:
            free(field(job, X))

    return Kernel(name, prepare, block, finish)
