"""Many rows times a 16-bit or 8-bit matrix, with the instructions that multiply two or four of them in a lane.

Rows are packed first (`packing`). The product takes a word of the matrix as it is stored, spreads it over a vector, and
multiplies it with the words of 16 rows: the matrix is never repacked, and read once for 64 rows. XLA:CPU repacks it for
every product, and has no instruction for four int8. Rows that are left over after the last vector of 16, if they are
few, are multiplied along the columns instead. Where there are hundreds of rows, it is `strips` that multiplies them.

GFLOP/s, 2 cores, best of 60, rows of float32 that are narrowed here and were narrowed before for XLA:

                                        XLA   here
    bfloat16   512 x 3072 x 576         855    818   (strips)
               512 x 576 x 1536         802    843   (strips)
                64 x 3072 x 576         713    891
    int8       512 x 3072 x 576         704   1645   (strips)
               512 x 576 x 1536         640   1613   (strips)
                64 x 3072 x 576         664   1468

Each alone and into memory of its own, whose first touch counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native import packing, strips
from rekindle_kernels.native.memory import acquire, f32, free, malloc, prefetch, set_i32
from rekindle_kernels.native.packing import (
    PACKS,
    PANEL,
    PANELS,
    SCALES,
    UPS,
    WEIGHT,
    WIDTH,
    K,
    R,
    count_packs,
    describe,
    finisher,
    left_over,
    packer,
    panels_of,
)
from rekindle_kernels.native.target import DONE, Kernel, field, first_unit, inline, jit, set_field
from rekindle_kernels.native.vector import LANES, load_f32, splat, store, store_totals
from rekindle_kernels.native.words import add_ints, total_of_ints, transpose

TOGETHER = 2 * PANEL  # rows for which a piece of the matrix is read once
OUTPUTS = 16  # of a tile: a whole cache line of the result
SUMS = (OUTPUTS * PANEL + LANES * OUTPUTS + OUTPUTS) * 4  # bytes of what a block keeps of 16 outputs
ZERO = np.float32(0)

# Fields of a job, behind those of `packing`.
PARTS, STRIPED = range(packing.FIELDS, packing.FIELDS + 2)


def kernel(name: str, size: int, add: Any) -> Kernel:
    """`(weight [N, K], factors [N], x [R, K], residual [R, N], gap [2], norm [K], eps [1]) -> [R, N]`; float32, but
    for the weight and `gap`: how many rows come before, and how many are in it, which are nobody's. `add(a, x, w)` adds
    the products of the elements in a word of x and one of the weight. int8: times the factor and a scale of the row. A
    result of [R, N / 2] is silu of the first outputs times the others, and a residual has its shape. A residual of
    [1, 1] and a norm of [1] are none."""
    pack = packer(size)
    prepare_strips, pack_rows, multiply_strip = strips.functions(size)
    finish_vector = finisher(size)

    @inline
    def prepare_panels(job: int, threads: int) -> int:
        rows = field(job, R)
        groups = max(1, (rows - left_over(rows) + TOGETHER - 1) // TOGETHER)
        parts = min(field(job, WIDTH) // OUTPUTS, (4 * threads + groups - 1) // groups)
        set_field(job, PARTS, parts)
        words = field(job, K) * size // 4 * (panels_of(rows) * PANEL + left_over(rows))
        set_field(job, PANELS, malloc((words + rows + LANES) * 4))
        set_field(job, SCALES, field(job, PANELS) + words * 4)
        return count_packs(job) + groups * parts

    @jit
    def prepare(frame: int, job: int, threads: int) -> int:
        describe(frame, job)
        set_field(job, STRIPED, 1 if field(job, R) >= strips.ENOUGH else 0)
        return prepare_strips(job, threads) if field(job, STRIPED) > 0 else prepare_panels(job, threads)

    @jit
    def finish(job: int) -> None:
        free(field(job, PANELS))

    @inline
    def two_vectors(w: int, x: int, words: int, sums: int, ahead: bool) -> None:
        """32 rows for 8 outputs: sums [8, 32]."""
        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = splat(ZERO)
        b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = splat(ZERO)
        step = words * 4
        v = w + 4 * step
        for j in range(words):
            x0, x1 = load_f32(x, j * PANEL), load_f32(x, j * PANEL + LANES)
            if ahead:
                prefetch(w + 16 // size * step + j * 32)
            y = splat(f32(w, j))
            a0, b0 = add(a0, x0, y), add(b0, x1, y)
            y = splat(f32(w + step, j))
            a1, b1 = add(a1, x0, y), add(b1, x1, y)
            y = splat(f32(w + 2 * step, j))
            a2, b2 = add(a2, x0, y), add(b2, x1, y)
            y = splat(f32(w + 3 * step, j))
            a3, b3 = add(a3, x0, y), add(b3, x1, y)
            y = splat(f32(v, j))
            a4, b4 = add(a4, x0, y), add(b4, x1, y)
            y = splat(f32(v + step, j))
            a5, b5 = add(a5, x0, y), add(b5, x1, y)
            y = splat(f32(v + 2 * step, j))
            a6, b6 = add(a6, x0, y), add(b6, x1, y)
            y = splat(f32(v + 3 * step, j))
            a7, b7 = add(a7, x0, y), add(b7, x1, y)
        store_both(sums, 0, a0, b0)
        store_both(sums, 1, a1, b1)
        store_both(sums, 2, a2, b2)
        store_both(sums, 3, a3, b3)
        store_both(sums, 4, a4, b4)
        store_both(sums, 5, a5, b5)
        store_both(sums, 6, a6, b6)
        store_both(sums, 7, a7, b7)

    @jit
    def first_of_group(w: int, x: int, words: int, sums: int) -> None:
        """Asks for the next outputs' weights little by little: all at once would wait for the memory."""
        two_vectors(w, x, words, sums, True)

    @jit
    def one_of_group(w: int, x: int, words: int, sums: int) -> None:
        two_vectors(w, x, words, sums, False)

    @inline
    def store_both(sums: int, output: int, a: Any, b: Any) -> None:
        store(sums, output * PANEL, a)
        store(sums, output * PANEL + LANES, b)

    @jit
    def one_vector(w: int, x: int, words: int, sums: int) -> None:
        """16 rows for 16 outputs: half of sums [16, 32]."""
        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = splat(ZERO)
        b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = splat(ZERO)
        step = words * 4
        v = w + 4 * step
        t = w + 8 * step
        u = w + 12 * step
        for j in range(words):
            y = load_f32(x, j * PANEL)
            prefetch(w + 16 * step + j * 64)
            a0, a1 = add(a0, y, splat(f32(w, j))), add(a1, y, splat(f32(w + step, j)))
            a2, a3 = add(a2, y, splat(f32(w + 2 * step, j))), add(a3, y, splat(f32(w + 3 * step, j)))
            a4, a5 = add(a4, y, splat(f32(v, j))), add(a5, y, splat(f32(v + step, j)))
            a6, a7 = add(a6, y, splat(f32(v + 2 * step, j))), add(a7, y, splat(f32(v + 3 * step, j)))
            b0, b1 = add(b0, y, splat(f32(t, j))), add(b1, y, splat(f32(t + step, j)))
            b2, b3 = add(b2, y, splat(f32(t + 2 * step, j))), add(b3, y, splat(f32(t + 3 * step, j)))
            b4, b5 = add(b4, y, splat(f32(u, j))), add(b5, y, splat(f32(u + step, j)))
            b6, b7 = add(b6, y, splat(f32(u + 2 * step, j))), add(b7, y, splat(f32(u + 3 * step, j)))
        store_halves(sums, a0, a1, a2, a3)
        store_halves(sums + 4 * PANEL * 4, a4, a5, a6, a7)
        store_halves(sums + 8 * PANEL * 4, b0, b1, b2, b3)
        store_halves(sums + 12 * PANEL * 4, b4, b5, b6, b7)

    @inline
    def store_halves(sums: int, a: Any, b: Any, c: Any, d: Any) -> None:
        store(sums, 0, a)
        store(sums, PANEL, b)
        store(sums, 2 * PANEL, c)
        store(sums, 3 * PANEL, d)

    @jit
    def put(job: int, sums: int, offsets: int, n: int, r: int, turned: int) -> None:
        """The results of 16 rows from r on for the outputs [n, n + OUTPUTS), as rows of whole cache lines."""
        transpose(sums, PANEL, turned, OUTPUTS)
        if field(job, UPS) > 0:
            transpose(sums + SUMS, PANEL, turned + SUMS, OUTPUTS)
        for i in range(min(LANES, field(job, R) - r)):
            finish_vector(job, turned + i * OUTPUTS * 4, offsets, SUMS, r + i, n)

    @jit
    def few(x: int, w: int, words: int, sums: int, alone: bool) -> None:
        """One of the rows that are left over, for 16 outputs."""
        for o in range(0, OUTPUTS, 4):
            a = b = c = d = splat(ZERO)
            v = w + o * words * 4
            for j in range(0, words, LANES):
                if alone:
                    for i in range(4, 8):
                        prefetch(v + (i * words + j) * 4)
                y = load_f32(x, j)
                a, b = add(a, y, load_f32(v, j)), add(b, y, load_f32(v, words + j))
                c, d = add(c, y, load_f32(v, 2 * words + j)), add(d, y, load_f32(v, 3 * words + j))
            if size == 2:
                store_totals(sums + o * 4, a, b, c, d)
            else:
                set_i32(sums, o, total_of_ints(a))
                set_i32(sums, o + 1, total_of_ints(b))
                set_i32(sums, o + 2, total_of_ints(c))
                set_i32(sums, o + 3, total_of_ints(d))

    @inline
    def set_offsets(w: int, words: int, offsets: int) -> None:
        """The sums of the weights of each output, of which 128 times are in its products: x has so much added."""
        for o in range(OUTPUTS):
            a = splat(ZERO)
            for j in range(0, words, LANES):
                a = add_ints(a, load_f32(w, o * words + j))
            set_i32(offsets, o, total_of_ints(a))

    @jit
    def multiply_block(job: int, index: int) -> None:
        rows, words, width = field(job, R), field(job, K) * size // 4, field(job, WIDTH)
        parts, units = field(job, PARTS), width // OUTPUTS
        group, part = index // parts, index % parts
        halves = 2 if field(job, UPS) > 0 else 1
        # Of both halves: sums by rows of outputs and by rows, and sums of the weights.
        scratch = malloc(2 * SUMS)
        turned, offsets = scratch + OUTPUTS * PANEL * 4, scratch + SUMS - OUTPUTS * 4
        whole = rows - left_over(rows)
        first, end = group * TOGETHER, min(whole, group * TOGETHER + TOGETHER)
        for unit in range(first_unit(part, parts, units), first_unit(part + 1, parts, units)):
            n = unit * OUTPUTS
            if size == 1:
                for half in range(halves):
                    w = field(job, WEIGHT) + (n + half * width) * words * 4
                    set_offsets(w, words, offsets + half * SUMS)
            for r in range(first, end, PANEL):
                x = field(job, PANELS) + r * words * 4
                both = r + LANES < end
                for half in range(halves):
                    w, sums = field(job, WEIGHT) + (n + half * width) * words * 4, scratch + half * SUMS
                    if not both:
                        one_vector(w, x, words, sums)
                    elif r == first:
                        first_of_group(w, x, words, sums)
                        first_of_group(w + 8 * words * 4, x, words, sums + 8 * PANEL * 4)
                    else:
                        one_of_group(w, x, words, sums)
                        one_of_group(w + 8 * words * 4, x, words, sums + 8 * PANEL * 4)
                put(job, scratch, offsets, n, r, turned)
                if both:
                    put(job, scratch + LANES * 4, offsets, n, r + LANES, turned)
            if end == whole:
                for r in range(whole, rows):
                    x = field(job, PANELS) + (panels_of(rows) * PANEL + r - whole) * words * 4
                    alone = r == 0  # else another's product has just asked for these weights
                    for half in range(halves):
                        w = field(job, WEIGHT) + (n + half * width) * words * 4
                        few(x, w, words, turned + half * SUMS, alone)
                    finish_vector(job, turned, offsets, SUMS, r, n)
        free(scratch)

    @jit
    def block(job: int, index: int) -> None:
        packs, striped = field(job, PACKS), field(job, STRIPED) > 0
        if index < packs:
            if striped:
                pack_rows(job, index)
            else:
                pack(job, index)
            return
        while acquire(job + 8 * DONE) < packs:  # by then every row is packed: no product is done before
            pass
        if striped:
            multiply_strip(job, index - packs)
        else:
            multiply_block(job, index - packs)

    return Kernel(name, prepare, block, finish)
