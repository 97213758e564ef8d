"""Many rows times a float32 matrix by AMX, which multiplies bfloat16: each number is the sum of three of those.

A float32 has 24 bits and a bfloat16 has eight. A number is rounded to bfloat16, then the rest of it, then what is left:
the three parts are the number itself. Of the nine products of two numbers' parts, six are added; the others are below
the last bit of the result. Rows are split once, into panels, and a piece of the matrix once for 512 rows.

A block computes 256 outputs. It takes 128 columns at a time, so that the parts of the rows, of the matrix and the sums
stay in a core's second cache. Milliseconds of one core of a Xeon that had other work, best of 11, for 512 rows:

                                 XLA   here
    4096 outputs, 1024 inputs   34.5   26.6
    1024 outputs, 4096 inputs   44.1   30.8

Sums of infinities are NaN. Products that are smaller than a normal number are 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from rekindle_kernels.native.kernels.gemm_amx import units_of
from rekindle_kernels.native.kernels.gemm_packing import (
    PANEL,
    count_packs,
    describe,
    finisher,
    packed_first,
    panels_of,
)
from rekindle_kernels.native.kernels.gemm_panels import OUTPUTS
from rekindle_kernels.native.kernels.norms_and_gates import normalise
from rekindle_kernels.native.kernels.operands import row_of
from rekindle_kernels.native.language.amx import (
    DEPTH,
    MEMORY,
    add_products_of_pairs,
    allowed,
    begin,
    end,
    load_tile,
    store_tile,
    zero_tile,
)
from rekindle_kernels.native.language.dot_products import add_pairs, rounded, store_rounded, transpose
from rekindle_kernels.native.language.handler import Kernel, first_unit
from rekindle_kernels.native.language.jit import emits, inline, jit
from rekindle_kernels.native.language.memory import LINE, WORD, f32, free, malloc
from rekindle_kernels.native.language.vector import LANES, load_f32, splat, store, subtract

PARTS = 3  # of a number
STEP = 2 * LANES  # columns that one instruction multiplies
PIECE = LANES * PANEL * 4  # bytes of one part of a step: of a panel's rows, in words of two columns, or of 32 outputs
TILE = PIECE // 2  # of 16 outputs: a line each
STEP_BYTES = PARTS * PIECE
UNIT_SUMS = 2 * PIECE  # bytes of the sums of 32 outputs, for a panel
STEPS, UNITS, ROWS = 4, 8, 512  # of a block: steps at a time, of 32 outputs each; rows that share a split matrix
PRODUCTS = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0))  # parts of an output and of a row: the largest comes last
ZERO = np.float32(0)
_OUTPUTS_AT, _ROWS_AT = 4, 6  # registers; those before have the sums
_SUMS_AT = [(2 * block + v, block * PIECE + v * LINE) for block in range(2) for v in range(2)]


@inline
def steps_of(job: Any) -> int:
    return (job.width + STEP - 1) // STEP


@inline
def split(source: int, width: int, column: int, out: int) -> None:
    """Write the parts of a row's 32 columns from `column` on; each is a line, and they are PIECE bytes apart."""
    for half in range(0, STEP, LANES):
        rest = load_f32(source, column + half) if column + half < width else splat(ZERO)
        for part in range(PARTS):
            whole = rounded(rest)
            store_rounded(out + part * PIECE, half, whole)
            rest = subtract(rest, whole)


@emits(types.void, types.int64)
def clear_sums(builder: Any, sums: Any) -> None:
    for register, _ in _SUMS_AT:
        zero_tile(builder, register)


@emits(types.void, types.int64)
def load_sums(builder: Any, sums: Any) -> None:
    for register, place in _SUMS_AT:
        load_tile(builder, register, builder.add(sums, WORD(place)), WORD(PANEL * 4))


@emits(types.void, types.int64)
def store_sums(builder: Any, sums: Any) -> None:
    for register, place in _SUMS_AT:
        store_tile(builder, register, builder.add(sums, WORD(place)), WORD(PANEL * 4))


@emits(types.void, types.int64, types.int64)
def add_step(builder: Any, weights: Any, rows: Any) -> None:
    """Add the products of a step to the sums of 32 outputs and a panel."""
    loaded = (-1, -1)
    for products in PRODUCTS:
        for i in range(2):
            if products[0] != loaded[0]:
                place = builder.add(weights, WORD(products[0] * PIECE + i * TILE))
                load_tile(builder, _OUTPUTS_AT + i, place, WORD(LINE))
            if products[1] != loaded[1]:
                place = builder.add(rows, WORD(products[1] * PIECE + i * LINE))
                load_tile(builder, _ROWS_AT + i, place, WORD(PANEL * 4))
        loaded = products
        for block in range(2):
            for v in range(2):
                add_products_of_pairs(builder, 2 * block + v, _OUTPUTS_AT + block, _ROWS_AT + v)


@jit
def multiply_by_tiles(weights: int, rows: int, steps: int, sums: int, begins: bool) -> None:
    if begins:
        clear_sums(sums)
    else:
        load_sums(sums)
    for step in range(steps):
        add_step(weights + step * STEP_BYTES, rows + step * STEP_BYTES)
    store_sums(sums)


@jit
def multiply_by_vectors(weights: int, rows: int, steps: int, sums: int, begins: bool) -> None:
    """Do the same where the system does not let this process use tile registers."""
    for n in range(2 * OUTPUTS):
        for v in range(0, PANEL, LANES):
            place = n * PANEL + v
            total = splat(ZERO) if begins else load_f32(sums, place)
            for step in range(steps):
                w, x = weights + step * STEP_BYTES + n * LINE, rows + step * STEP_BYTES
                for a, b in PRODUCTS:
                    for word in range(LANES):
                        row_words = load_f32(x + b * PIECE, word * PANEL + v)
                        total = add_pairs(total, row_words, splat(f32(w + a * PIECE, word)))
            store(sums, place, total)


@jit
def pack(job: Any, index: int) -> None:
    """Split a block of rows, sixteen at a time, into panels."""
    width, steps, per_pack = job.width, steps_of(job), job.per_pack
    normed = malloc(LANES * width * 4 + STEP_BYTES)
    parts = normed + LANES * width * 4  # a step's, row by row
    for vector in range(index * per_pack, min((index + 1) * per_pack, (job.rows + LANES - 1) // LANES)):
        first = vector * LANES
        panel = job.packed + first // PANEL * steps * STEP_BYTES + first % PANEL * 4
        rows = min(LANES, job.rows - first)
        if job.norm > 0:
            for lane in range(rows):
                x = job.x + row_of(job, first + lane) * width * 4
                normalise(x, job.norm, job.eps, width, normed + lane * width * 4)
        for step in range(steps):
            for lane in range(LANES):
                x = normed + lane * width * 4 if job.norm > 0 else job.x + row_of(job, first + lane) * width * 4
                split(x, width if lane < rows else 0, step * STEP, parts + lane * LINE)
            for part in range(PARTS):
                transpose(parts + part * PIECE, LANES, panel + step * STEP_BYTES + part * PIECE, PANEL)
    free(normed)


@jit
def split_outputs(job: Any, unit: int, first: int, steps: int, out: int) -> None:
    """Split so many steps of the rows of the matrix that a unit has; zeros where it has sixteen outputs alone."""
    width, ups = job.width, job.ups
    n = unit * (OUTPUTS if ups > 0 else 2 * OUTPUTS)
    for block in range(2):
        start = n if block == 0 else n + (ups if ups > 0 else OUTPUTS)
        seen = width if block == 0 or ups > 0 or start < job.results else 0
        for i in range(OUTPUTS):
            row = job.weight + (start + i) * width * 4
            for step in range(steps):
                split(row, seen, (first + step) * STEP, out + step * STEP_BYTES + block * TILE + i * LINE)


def kernel() -> Kernel:
    """Many rows times a matrix of float32, with three bfloat16 for each number."""
    finish_vector = finisher(4, corrected=False)

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        describe(frame, job, 4)
        job.tiled = 1  # panels are whole
        job.by_vectors = 0 if frame.settings.amx > 0 and allowed() > 0 else 1
        units, groups = units_of(job), max(1, (job.rows + ROWS - 1) // ROWS)
        job.parts = min(units, max(threads, min(4 * threads, (units + UNITS - 1) // UNITS)))
        job.packed = malloc(panels_of(job) * steps_of(job) * STEP_BYTES + LINE)
        return count_packs(job) + groups * job.parts

    @jit
    def put(job: Any, sums: int, unit: int, first: int, last: int, turned: int) -> None:
        """Write the results of a panel for a unit."""
        n = unit * (OUTPUTS if job.ups > 0 else 2 * OUTPUTS)
        two = job.ups == 0 and n + OUTPUTS < job.results
        for r in range(first, last, LANES):
            for block in range(2):
                transpose(sums + block * PIECE + (r - first) * 4, PANEL, turned + block * TILE, OUTPUTS)
            for i in range(min(LANES, last - r)):
                finish_vector(job, turned + i * OUTPUTS * 4, 0, TILE, r + i, n)
                if two:
                    finish_vector(job, turned + TILE + i * OUTPUTS * 4, 0, 0, r + i, n + OUTPUTS)

    @jit
    def multiply(job: Any, index: int) -> None:
        steps, units, parts = steps_of(job), units_of(job), job.parts
        group, part = index // parts, index % parts
        first, last = group * ROWS, min(job.rows, (group + 1) * ROWS)
        panels, end_unit = (last - first + PANEL - 1) // PANEL, first_unit(part + 1, parts, units)
        shapes = malloc(MEMORY)
        if job.by_vectors == 0:
            begin(shapes, DEPTH)
        weights = malloc(UNITS * STEPS * STEP_BYTES + UNITS * panels * UNIT_SUMS + 2 * TILE)
        sums = weights + UNITS * STEPS * STEP_BYTES
        turned = sums + UNITS * panels * UNIT_SUMS
        for unit in range(first_unit(part, parts, units), end_unit, UNITS):
            count = min(UNITS, end_unit - unit)
            for step in range(0, steps, STEPS):
                depth = min(STEPS, steps - step)
                for u in range(count):
                    split_outputs(job, unit + u, step, depth, weights + u * STEPS * STEP_BYTES)
                for p in range(panels):
                    x = job.packed + ((first // PANEL + p) * steps + step) * STEP_BYTES
                    for u in range(count):
                        w, at = weights + u * STEPS * STEP_BYTES, sums + (u * panels + p) * UNIT_SUMS
                        if job.by_vectors == 0:
                            multiply_by_tiles(w, x, depth, at, step == 0)
                        else:
                            multiply_by_vectors(w, x, depth, at, step == 0)
            for u in range(count):
                for p in range(panels):
                    begins = first + p * PANEL
                    put(job, sums + (u * panels + p) * UNIT_SUMS, unit + u, begins, min(last, begins + PANEL), turned)
        free(weights)
        if job.by_vectors == 0:
            end(shapes)
        free(shapes)

    return packed_first(prepare, pack, multiply)
