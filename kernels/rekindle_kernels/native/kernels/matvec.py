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

from typing import Any, NamedTuple

import numpy as np

from rekindle_kernels.native import cpu
from rekindle_kernels.native.kernel_table import MATVEC
from rekindle_kernels.native.kernels.norms_and_gates import normalise
from rekindle_kernels.native.kernels.operands import first_row
from rekindle_kernels.native.language.handler import Kernel, first_unit, job_layout
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import LINE, f32, free, malloc, prefetcher, set_f32
from rekindle_kernels.native.language.records import dim, take
from rekindle_kernels.native.language.vector import (
    LANES,
    Storage,
    add,
    load_f32,
    multiply,
    multiply_add,
    splat,
    store,
    total,
)
from rekindle_kernels.native.language.vector_math import silu

ZERO = np.float32(0)
STEP = 8 * LANES  # weights of one row in four sums: with one sum int8 took 10 % longer, waiting for the sum before
BLOCK_BYTES = 768 << 10  # of weights. A block's first lines are not prefetched: blocks of 192 KiB took 2 to 5 % longer
# Bytes of an output's weights from which one row prefetches as several do. One core of a Zen 4 without prefetching,
# as shares of its rate with it: 1,152 bytes 1.13, 3,072 1.31, 4,096 0.99, 5,120 0.87, 8,192 0.83.
LONG = 4 << 10

JOB = job_layout(
    "matvec",
    {
        "weight": "[outputs, width]",
        "scale": "[outputs], of int8 weights",
        "x": "[rows, width], normed",
        "residual": "[rows, height], or 0",
        "out": "[rows, height]",
        "height": "results of a row",
        "normed": "1 if x is memory of the job's own",
        "gated": "1 if the outputs are gates and then ups",
        "invariant": "1 if a row's products are added in the same order whatever the number of rows",
    },
    "rows width",
)


@inline
def unit(job: Any) -> int:
    """Return the unit of results in a block, which has whole units: pairs or vectors."""
    return LANES if job.gated > 0 else 2


@inline
def units(job: Any) -> int:
    return (job.height + unit(job) - 1) // unit(job)


@inline
def rows_to_compute(frame: Any) -> int:
    """Return a gap amid so few rows is not worth stepping over."""
    rows = dim(frame.x, 0)
    if frame.has_rows:
        before = max(0, min(frame.rows.before, rows))
        return before if before + frame.rows.gap >= rows else rows
    return rows


@inline
def set_rows(frame: Any, job: Any) -> None:
    """The rows that are multiplied, normed into memory of the job's own if there is a norm."""
    rows, width = rows_to_compute(frame), dim(frame.weight, 1)
    job.rows = rows
    job.width = width
    job.normed = 1 if frame.has_norm else 0
    if frame.has_norm:
        job.x = malloc(rows * width * 4)
        for r in range(rows):
            at = r * width * 4
            normalise(frame.x.data + at, frame.norm.data, frame.settings.eps, width, job.x + at)


class RowFunctions(NamedTuple):
    """The functions that products of one row and of several rows share."""

    ask_for: Any  # (address, weights)
    remainder: Any  # (weight, x, K, start) -> sum
    one_row: Any  # (weight, x, K, out)


def row_functions(storage: Storage, how: cpu.Prefetch | None = None) -> RowFunctions:
    """One output of one row, and its parts, which prefetch weights as one row of them is best read unless `how` says
    otherwise.

    Weights are prefetched, since the prefetchers of most processors stop at every page of memory: line by line between
    the products, as a whole row's at once fill the queue of misses, and everything waits for it (30 GB/s instead of 37,
    2 rows). A Zen 4's own prefetcher reads 16 bits for one row faster, as they follow each other in memory, and those
    of two outputs in turn at half the rate. Where two rows of weights are read in turn they are prefetched in the order
    of their addresses, too: 5 % less time for 2 rows.
    """
    read, load, size = storage
    cache, ahead = how or (cpu.prefetch().int8 if size == 1 else cpu.prefetch().wide)
    prefetch = prefetcher(cache)

    @inline
    def ask_for(address: int, weights: int) -> None:
        """Prefetch so many weights, as far ahead of the address as they will be read later."""
        for line in range(0, weights * size, LINE):
            prefetch(address + ahead + line)

    @inline
    def remainder(weight: int, x: int, K: int, start: int) -> float:
        """One output of one row, from element `start` on."""
        a, end = splat(ZERO), start + (K - start) // LANES * LANES
        for k in range(start, end, LANES):
            prefetch(weight + ahead + k * size)
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
            ask_for(weight + k * size, STEP)
            for i in range(k, k + STEP, 4 * LANES):
                a = multiply_add(load(weight, i), load_f32(x, i), a)
                b = multiply_add(load(weight, i + LANES), load_f32(x, i + LANES), b)
                c = multiply_add(load(weight, i + 2 * LANES), load_f32(x, i + 2 * LANES), c)
                d = multiply_add(load(weight, i + 3 * LANES), load_f32(x, i + 3 * LANES), d)
        set_f32(out, 0, total(add(add(a, b), add(c, d))) + remainder(weight, x, K, end))

    return RowFunctions(ask_for, remainder, one_row)


def two_rows(storage: Storage, parts: RowFunctions) -> Any:
    """Return `two_by_two(weight, x, K, N, out)`: two outputs for two rows; their results lie N numbers apart."""
    (_, load, size), (ask_for, remainder, _) = storage, parts

    @inline
    def two_by_two(weight: int, x: int, K: int, N: int, out: int) -> None:
        a = b = c = d = e = f = g = h = splat(ZERO)
        below, end = weight + K * size, K // (2 * LANES) * 2 * LANES
        for k in range(0, end, 2 * LANES):
            ask_for(weight + 2 * k * size, 4 * LANES)
            w, v, y, z = load(weight, k), load(below, k), load_f32(x, k), load_f32(x, K + k)
            a, b = multiply_add(w, y, a), multiply_add(v, y, b)
            c, d = multiply_add(w, z, c), multiply_add(v, z, d)
            w, v = load(weight, k + LANES), load(below, k + LANES)
            y, z = load_f32(x, k + LANES), load_f32(x, K + k + LANES)
            e, f = multiply_add(w, y, e), multiply_add(v, y, f)
            g, h = multiply_add(w, z, g), multiply_add(v, z, h)
        set_f32(out, 0, total(add(a, e)) + remainder(weight, x, K, end))
        set_f32(out, 1, total(add(b, f)) + remainder(below, x, K, end))
        set_f32(out, N, total(add(c, g)) + remainder(weight, x + 4 * K, K, end))
        set_f32(out, N + 1, total(add(d, h)) + remainder(below, x + 4 * K, K, end))

    return two_by_two


class InOrder(NamedTuple):
    """Products that add up their sums in one order for any number of rows."""

    two_by_four: Any  # (weight, x, K, N, out): two outputs for four rows
    one_by_two: Any  # (weight, x, K, count, out): one output, or two, of one row


def in_order(storage: Storage, parts: RowFunctions) -> InOrder:
    """Return the products of four rows and of one that have the same sums."""
    (_, load, size), (ask_for, remainder, _) = storage, parts

    @inline
    def two_by_four(weight: int, x: int, K: int, N: int, out: int) -> None:
        a = b = c = d = e = f = g = h = splat(ZERO)
        below, end = weight + K * size, K // LANES * LANES
        for k in range(0, end, LANES):
            if k % (64 // size) == 0:
                ask_for(weight + 2 * k * size, 128 // size)
            w, v = load(weight, k), load(below, k)
            y = load_f32(x, k)
            a, b = multiply_add(w, y, a), multiply_add(v, y, b)
            y = load_f32(x, K + k)
            c, d = multiply_add(w, y, c), multiply_add(v, y, d)
            y = load_f32(x, 2 * K + k)
            e, f = multiply_add(w, y, e), multiply_add(v, y, f)
            y = load_f32(x, 3 * K + k)
            g, h = multiply_add(w, y, g), multiply_add(v, y, h)
        set_f32(out, 0, total(a) + remainder(weight, x, K, end))
        set_f32(out, 1, total(b) + remainder(below, x, K, end))
        set_f32(out, N, total(c) + remainder(weight, x + 4 * K, K, end))
        set_f32(out, N + 1, total(d) + remainder(below, x + 4 * K, K, end))
        set_f32(out, 2 * N, total(e) + remainder(weight, x + 8 * K, K, end))
        set_f32(out, 2 * N + 1, total(f) + remainder(below, x + 8 * K, K, end))
        set_f32(out, 3 * N, total(g) + remainder(weight, x + 12 * K, K, end))
        set_f32(out, 3 * N + 1, total(h) + remainder(below, x + 12 * K, K, end))

    @inline
    def one_by_two(weight: int, x: int, K: int, count: int, out: int) -> None:
        a = b = splat(ZERO)
        below, end = weight + (count - 1) * K * size, K // LANES * LANES
        for k in range(0, end, LANES):
            if k % (64 // size) == 0:
                ask_for(weight + 2 * k * size, 128 // size)
            y = load_f32(x, k)
            a, b = multiply_add(load(weight, k), y, a), multiply_add(load(below, k), y, b)
        set_f32(out, 0, total(a) + remainder(weight, x, K, end))
        if count == 2:
            set_f32(out, 1, total(b) + remainder(below, x, K, end))

    return InOrder(two_by_four, one_by_two)


def row_products(storage: Storage) -> Any:
    """Return `for_all_rows(job, weight, count, out, N)`: one output, or two, of every row, into rows of N numbers."""
    size, parts = storage.size, row_functions(storage, cpu.prefetch().several)
    short_row, long_row = (row_functions(storage, how).one_row for how in (None, cpu.prefetch().several))
    two_by_two, (two_by_four, one_by_two) = two_rows(storage, parts), in_order(storage, parts)

    @inline
    def one_row(weight: int, x: int, K: int, out: int) -> None:
        """One output of one row, prefetched as suits the length of its weights."""
        if K * size < LONG:
            short_row(weight, x, K, out)
        else:
            long_row(weight, x, K, out)

    @inline
    def for_all_rows_in_order(job: Any, weight: int, count: int, out: int, N: int) -> None:
        R, K, r = job.rows, job.width, 0
        while r < R:
            x, here = job.x + 4 * r * K, out + 4 * r * N
            if count == 2 and r + 4 <= R:
                two_by_four(weight, x, K, N, here)
                r += 4
            else:
                one_by_two(weight, x, K, count, here)
                r += 1

    @inline
    def for_all_rows(job: Any, weight: int, count: int, out: int, N: int) -> None:
        if job.invariant > 0:
            for_all_rows_in_order(job, weight, count, out, N)
            return
        R, K, r = job.rows, job.width, 0
        while r < R:
            x, here = job.x + 4 * r * K, out + 4 * r * N
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

    return for_all_rows


def gated_blocks(size: int, scaled: bool, for_all_rows: Any) -> Any:
    """Return `gated_block(job, begin, end)`: silu of gates times ups."""

    @jit
    def gated_block(job: Any, begin: int, end: int) -> None:
        """The results [begin, end), a whole number of vectors: all their gates first, then their ups."""
        R, K, N, count = job.rows, job.width, job.height, end - begin
        residual = job.residual
        ups = count * 4  # bytes after the gates
        products = malloc(R * 2 * ups)
        for half in range(2):
            for i in range(0, count, 2):
                weight = job.weight + (begin + half * N + i) * K * size
                for_all_rows(job, weight, 2, products + half * ups + i * 4, 2 * count)
        for r in range(R):
            here, out = products + r * 2 * ups, job.out + (r * N + begin) * 4
            for i in range(0, count, LANES):
                gate, up = load_f32(here, i), load_f32(here + ups, i)
                if scaled:
                    gate = multiply(gate, load_f32(job.scale, begin + i))
                    up = multiply(up, load_f32(job.scale, N + begin + i))
                y = multiply(silu(gate), up)
                if residual > 0:
                    y = add(y, load_f32(residual, r * N + begin + i))
                store(out, i, y)
        free(products)

    return gated_block


def kernel(storage: Storage, scaled: bool) -> Kernel:
    """Few rows times a matrix; `scaled`: each output is multiplied by a scale."""
    size = storage.size
    for_all_rows = row_products(storage)
    gated_block = gated_blocks(size, scaled, for_all_rows)

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        take(frame, job)
        set_rows(frame, job)
        job.height = dim(frame.out, 1)
        outputs = 2 * job.height if job.gated > 0 else job.height
        first = first_row(frame, outputs)
        job.weight = frame.weight.data + first * job.width * size
        job.scale = frame.scale.data + first * 4
        rounds = (outputs * job.width * size + threads * BLOCK_BYTES - 1) // (threads * BLOCK_BYTES)
        return min(rounds * threads, units(job))

    @jit
    def block(job: Any, index: int) -> None:
        R, N, scale, residual = job.rows, job.height, job.scale, job.residual
        begin = first_unit(index, job.blocks, units(job)) * unit(job)
        end = min(N, first_unit(index + 1, job.blocks, units(job)) * unit(job))
        if job.gated > 0:
            gated_block(job, begin, end)
            return
        for n in range(begin, end, 2):
            count, out = min(2, end - n), job.out + n * 4
            for_all_rows(job, job.weight + n * job.width * size, count, out, N)
            for r in range(R):
                for i in range(count):
                    y = f32(out, r * N + i)
                    if scaled:
                        y = y * f32(scale, n + i)
                    if residual > 0:
                        y = y + f32(residual, r * N + n + i)
                    set_f32(out, r * N + i, y)

    @jit
    def finish(job: Any) -> None:
        if job.normed > 0:
            free(job.x)

    return Kernel(MATVEC, JOB, prepare, block, finish)
