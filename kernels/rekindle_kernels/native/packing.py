"""The first part of every product of `panels`, rows narrowed to what its instructions multiply, and the last.

A word of four bytes holds what one row has for two (bfloat16) or four (int8) columns, and 32 rows lie next to each
other, so that one load fills a vector with 16 of them. Rows that are left over after the last vector, if they are few,
follow as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native.gating import silu
from rekindle_kernels.native.memory import f32, free, i32, malloc, set_f32
from rekindle_kernels.native.norm import normalise
from rekindle_kernels.native.target import dim, field, inline, jit, operand, result, result_dim, set_field
from rekindle_kernels.native.vector import (
    LANES,
    add,
    larger,
    largest,
    load_f32,
    magnitude,
    multiply,
    nearest,
    splat,
    store,
)
from rekindle_kernels.native.words import from_ints, store_rounded, store_u8, transpose

PANEL = 2 * LANES  # rows that lie next to each other
LEFT_OVER = 4  # rows behind the last vector that are not worth one
PACKED_BYTES = 128 << 10  # of rows that one thread packs: to wake another takes as long
ZERO, ONE, TINY, TOP = np.float32(0), np.float32(1), np.float32(1e-30), np.float32(127)

# Fields of a product's job: rows X [R, K], normed first if NORM is an address, which become rows at PANELS, for int8
# with SCALES [R]; what they are multiplied with; and where results [R, WIDTH] go. If UPS is not 0, the outputs from
# there on are multiplied with silu of those before. R counts the rows that are multiplied: the first BEFORE, and those
# behind the GAP.
X, R, K, NORM, EPS, PANELS, SCALES, PER_PACK, PACKS = range(9)
WEIGHT, FACTORS, RESIDUAL, OUT, WIDTH, UPS, BEFORE, GAP = range(9, 17)
GROUP = 17  # rows that a block multiplies
FIELDS = 18  # the others' begin here


@inline
def describe(frame: int, job: int) -> None:
    """The operands of `panels.kernel`."""
    set_field(job, WEIGHT, operand(frame, 0))
    set_field(job, FACTORS, operand(frame, 1))
    set_field(job, X, operand(frame, 2))
    rows, before, gap = dim(frame, 2, 0), i32(operand(frame, 4), 0), i32(operand(frame, 4), 1)
    set_field(job, BEFORE, before)
    set_field(job, GAP, gap)
    set_field(job, R, min(before, rows) + max(0, rows - before - gap))
    set_field(job, K, dim(frame, 0, 1))
    set_field(job, WIDTH, result_dim(frame, 0, 1))
    set_field(job, UPS, field(job, WIDTH) if field(job, WIDTH) < dim(frame, 0, 0) else 0)
    set_field(job, RESIDUAL, operand(frame, 3) if dim(frame, 3, 1) == field(job, WIDTH) else 0)
    set_field(job, NORM, operand(frame, 5) if dim(frame, 5, 0) == field(job, K) else 0)
    set_field(job, EPS, operand(frame, 6))
    set_field(job, OUT, result(frame, 0))


@inline
def place(job: int, r: int) -> int:
    """Where row r is among all rows."""
    return r if r < field(job, BEFORE) else r + field(job, GAP)


@inline
def left_over(rows: int) -> int:
    """Rows that no vector takes."""
    return rows % LANES if rows % LANES <= LEFT_OVER else 0


@inline
def panels_of(rows: int) -> int:
    return (rows - left_over(rows) + PANEL - 1) // PANEL


@inline
def count_packs(job: int) -> int:
    """Blocks of packing."""
    per_pack = max(1, PACKED_BYTES // (LANES * field(job, K) * 4))
    vectors = (field(job, R) + LANES - 1) // LANES
    set_field(job, PER_PACK, per_pack)
    set_field(job, PACKS, (vectors + per_pack - 1) // per_pack)
    return field(job, PACKS)


def narrower(size: int) -> Any:
    """`narrow(job, r, out, scratch)`: row r as it will be multiplied, in numbers of `size` bytes; int8 with an offset
    of 128."""

    @inline
    def narrow(job: int, r: int, out: int, scratch: int) -> None:
        width, x = field(job, K), field(job, X) + place(job, r) * field(job, K) * 4
        if field(job, NORM) > 0:
            normalise(x, field(job, NORM), f32(field(job, EPS), 0), width, scratch)
            x = scratch
        if size == 2:
            for k in range(0, width, LANES):
                store_rounded(out, k, load_f32(x, k))
            return
        highest = splat(TINY)
        for k in range(0, width, LANES):
            highest = larger(highest, magnitude(load_f32(x, k)))
        scale = largest(highest) / TOP
        set_f32(field(job, SCALES), r, scale)
        factor = splat(ONE / scale)
        for k in range(0, width, LANES):
            store_u8(out, k, nearest(multiply(load_f32(x, k), factor)))

    return narrow


def finisher(size: int) -> Any:
    """`finish(job, sums, weights, behind, r, n)`: the results of row r for 16 outputs from n on, from the sums of their
    products at an address, for int8 with the sums of their weights, each of which was multiplied with 128 too much.
    Where results are gated, what is the same of the outputs from n + UPS on lies `behind` bytes behind both."""

    @inline
    def scaled(job: int, sums: int, weights: int, r: int, n: int) -> Any:
        y = load_f32(sums, 0)
        if size == 1:
            scale, factors = splat(f32(field(job, SCALES), r)), load_f32(field(job, FACTORS), n)
            y = multiply(multiply(from_ints(y, load_f32(weights, 0)), factors), scale)
        return y

    @inline
    def finish(job: int, sums: int, weights: int, behind: int, r: int, n: int) -> None:
        at = (place(job, r) * field(job, WIDTH) + n) * 4
        y, ups = scaled(job, sums, weights, r, n), field(job, UPS)
        if ups > 0:
            y = multiply(silu(y), scaled(job, sums + behind, weights + behind, r, n + ups))
        if field(job, RESIDUAL) > 0:
            y = add(y, load_f32(field(job, RESIDUAL) + at, 0))
        store(field(job, OUT) + at, 0, y)

    return finish


def packer(size: int) -> Any:
    """`pack(job, index)`, one block of it, for numbers of `size` bytes."""
    narrow = narrower(size)

    @inline
    def sixteen(job: int, first: int) -> None:
        """The rows [first, first + 16)."""
        rows, words = field(job, R), field(job, K) * size // 4
        lines = malloc((LANES * words + field(job, K)) * 4)
        scratch = lines + LANES * words * 4
        if first >= rows - left_over(rows):
            for r in range(first, rows):
                narrow(job, r, field(job, PANELS) + (panels_of(rows) * PANEL + r - first) * words * 4, scratch)
            free(lines)
            return
        for lane in range(LANES):
            if first + lane < rows:
                narrow(job, first + lane, lines + lane * words * 4, scratch)
            else:
                for j in range(0, words, LANES):
                    store(lines, lane * words + j, splat(ZERO))
        panel = field(job, PANELS) + (first // PANEL * PANEL * words + first % PANEL) * 4
        for j in range(0, words, LANES):
            transpose(lines + j * 4, words, panel + j * PANEL * 4, PANEL)
        free(lines)

    @jit
    def pack(job: int, index: int) -> None:
        per_pack = field(job, PER_PACK)
        for vector in range(index * per_pack, min((index + 1) * per_pack, (field(job, R) + LANES - 1) // LANES)):
            sixteen(job, vector * LANES)

    return pack
