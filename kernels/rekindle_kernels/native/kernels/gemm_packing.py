"""The first part of every product of `gemm`, rows narrowed to what its instructions multiply, and the last part.

A word of four bytes holds what one row has for two (bfloat16) or four (int8) columns. In a panel the words of 32 rows
lie next to each other, so that one load fills a vector with those of 16 rows. Rows that are left over after the last
vector, if they are few, follow the panels as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.kernels.norms_and_gates import normalise
from rekindle_kernels.native.kernels.operands import (
    ROW_FIELDS,
    ROW_NUMBERS,
    describe_rows,
    first_row,
    free_packed,
    row_of,
)
from rekindle_kernels.native.language.dot_products import (
    from_ints,
    store_i8,
    store_rounded,
    store_u8,
    to_floats,
    transpose,
    unsigned,
)
from rekindle_kernels.native.language.handler import Kernel, job_layout, wait_for_blocks
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import f32, free, malloc, set_f32
from rekindle_kernels.native.language.records import dim
from rekindle_kernels.native.language.vector import (
    LANES,
    add,
    larger_magnitude,
    largest_magnitude,
    load_f32,
    multiply,
    nearest,
    splat,
    store,
)
from rekindle_kernels.native.language.vector_math import silu

PANEL = 2 * LANES  # rows that lie next to each other
LEFT_OVER = 4  # rows after the last whole vector that are not worth another
PACKED_BYTES = 128 << 10  # of rows that one thread packs: to wake another takes as long
ZERO, ONE, TINY, TOP = np.float32(0), np.float32(1), np.float32(1e-30), np.float32(127)

JOB = job_layout(
    "gemm",
    {
        **ROW_FIELDS,
        "width": "columns of the matrix",
        "packed": "the rows as they are multiplied: in panels, or one after another",
        "row_scales": "[rows], of 8-bit rows",
        "per_pack": "vectors or rows that a block packs",
        "packs": "blocks that pack; those that multiply follow",
        "weight": "[outputs, width]",
        "scale": "[outputs], of int8 weights",
        "ups": "outputs before the first up, or 0: outputs from there on are multiplied by silu of those before",
        "group": "rows that a block multiplies",
        "parts": "blocks into which the outputs are cut",
        "striped": "1 if the matrix is turned, strip by strip",
        "tiled": "1 if it is multiplied by AMX: no row is left over then",
        "by_vectors": "1 if float32 numbers, split into bfloat16, are multiplied without AMX",
        "wanted": "[pieces]: where each piece of memory begins that is prefetched meanwhile, or 0",
        "pace": "bytes of a piece that are prefetched with each word of a tile",
    },
    "pieces",
    numbers=ROW_NUMBERS,
)


def packed_first(prepare: Any, pack: Any, multiply: Any) -> Kernel:
    """Return the kernel of a product with blocks of two kinds: the first ones pack rows, then the others multiply."""

    @jit
    def block(job: Any, index: int) -> None:
        if index < job.packs:
            pack(job, index)
            return
        wait_for_blocks(job, job.packs)
        multiply(job, index - job.packs)

    return Kernel(kernel_table.GEMM, JOB, prepare, block, free_packed)


@inline
def describe(frame: Any, job: Any, size: int) -> None:
    """Note in the job what the operands say; weights are numbers of `size` bytes."""
    describe_rows(frame, job)
    job.width = dim(frame.weight, 1)
    job.ups = job.results if frame.settings.gated > 0 else 0
    first = first_row(frame, job.results + job.ups)
    job.weight = frame.weight.data + first * job.width * size
    job.scale = frame.scale.data + first * 4
    job.tiled = 0
    job.wanted = 0
    job.pieces = 0


@inline
def left_over(job: Any) -> int:
    """Return how many rows follow after the last vector."""
    behind = job.rows % LANES
    return behind if behind <= LEFT_OVER and job.tiled == 0 else 0


@inline
def panels_of(job: Any) -> int:
    """Return the number of panels that the rows fill, without the rows left over."""
    return (job.rows - left_over(job) + PANEL - 1) // PANEL


@inline
def count_packs(job: Any) -> int:
    """Return how many blocks of work it is to pack all rows."""
    per_pack = max(1, PACKED_BYTES // (LANES * job.width * 4))
    vectors = (job.rows + LANES - 1) // LANES
    job.per_pack = per_pack
    job.packs = (vectors + per_pack - 1) // per_pack
    return job.packs


def narrower(size: int, *, signed: bool = False) -> Any:
    """Return `narrow(job, r, out, scratch)`: row r as it will be multiplied, in numbers of `size` bytes.

    8-bit rows are stored as unsigned integers, 128 larger than the numbers they stand for, where that is what the
    instruction multiplies, unless they are to be `signed`.
    """
    store_integers = store_u8 if unsigned() and not signed else store_i8

    @inline
    def narrow(job: Any, r: int, out: int, scratch: int) -> None:
        width, x = job.width, job.x + row_of(job, r) * job.width * 4
        if job.norm > 0:
            normalise(x, job.norm, job.eps, width, scratch)
            x = scratch
        if size == 2:
            for k in range(0, width, LANES):
                store_rounded(out, k, load_f32(x, k))
            return
        highest = splat(TINY)
        for k in range(0, width, LANES):
            highest = larger_magnitude(highest, load_f32(x, k))
        scale = largest_magnitude(highest) / TOP
        set_f32(job.row_scales, r, scale)
        factor = splat(ONE / scale)
        for k in range(0, width, LANES):
            store_integers(out, k, nearest(multiply(load_f32(x, k), factor)))

    return narrow


def finisher(size: int, *, corrected: bool | None = None) -> Any:
    """Return `finish(job, sums, weight_sums, behind, r, n)`: the results of row r for 16 outputs from n on.

    `sums` is the address of the sums of their products. Where rows are unsigned integers, 128 was added to each of
    them, so the sum of an output's products is too large by 128 times the sum of its weights: `weight_sums` is the
    address of these. Where results are gated, the sums of the up projection start `behind` bytes after each address.
    """
    corrected = unsigned() if corrected is None else corrected

    @inline
    def scaled(job: Any, sums: int, weight_sums: int, r: int, n: int) -> Any:
        y = load_f32(sums, 0)
        if size == 1:
            scale, factors = splat(f32(job.row_scales, r)), load_f32(job.scale, n)
            y = from_ints(y, load_f32(weight_sums, 0)) if corrected else to_floats(y)
            y = multiply(multiply(y, factors), scale)
        return y

    @inline
    def finish(job: Any, sums: int, weight_sums: int, behind: int, r: int, n: int) -> None:
        at = (row_of(job, r) * job.results + n) * 4
        y, ups = scaled(job, sums, weight_sums, r, n), job.ups
        if ups > 0:
            y = multiply(silu(y), scaled(job, sums + behind, weight_sums + behind, r, n + ups))
        if job.residual > 0:
            y = add(y, load_f32(job.residual + at, 0))
        store(job.out + at, 0, y)

    return finish


def packer(size: int, *, signed: bool = False) -> Any:
    """Return `pack(job, index)`: a block of rows into panels, in numbers of `size` bytes."""
    narrow = narrower(size, signed=signed)

    @inline
    def pack_sixteen(job: Any, first: int) -> None:
        """Pack rows [first, first + 16) into half of a panel, or after the panels if they are left over."""
        rows, words = job.rows, job.width * size // 4
        lines = malloc((LANES * words + job.width) * 4)
        scratch = lines + LANES * words * 4
        if first >= rows - left_over(job):
            for r in range(first, rows):
                narrow(job, r, job.packed + (panels_of(job) * PANEL + r - first) * words * 4, scratch)
            free(lines)
            return
        for lane in range(LANES):
            if first + lane < rows:
                narrow(job, first + lane, lines + lane * words * 4, scratch)
            else:
                for j in range(0, words, LANES):
                    store(lines, lane * words + j, splat(ZERO))
        panel = job.packed + (first // PANEL * PANEL * words + first % PANEL) * 4
        for j in range(0, words, LANES):
            transpose(lines + j * 4, words, panel + j * PANEL * 4, PANEL)
        free(lines)

    @jit
    def pack(job: Any, index: int) -> None:
        per_pack = job.per_pack
        for vector in range(index * per_pack, min((index + 1) * per_pack, (job.rows + LANES - 1) // LANES)):
            pack_sixteen(job, vector * LANES)

    return pack
