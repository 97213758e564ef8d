"""Hundreds of rows times a 16-bit or 8-bit matrix: strips of the matrix are turned, and every row passes over them.

A strip is 32 outputs, laid out so that a load fills a vector with the words of 16 of them. A word of a row, spread over
a vector, multiplies two such vectors, and 12 rows times 32 outputs stay in registers until they are done: they come out
as they are stored. In `gemm_panels` it is the rows that are turned, in memory, and so are the results. To turn a strip
costs what 8 to 16 rows do.

1,024 tokens, 135M bfloat16, milliseconds of CPU time     panels   strips
    one thread                                               594      567
    two, in a minute in which memory was slow                791      619
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native.kernels.gemm_packing import finisher, narrower
from rekindle_kernels.native.kernels.gemm_tile import multiply_tile
from rekindle_kernels.native.language.dot_products import add_ints, transpose
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import free, malloc, prefetch
from rekindle_kernels.native.language.vector import LANES, load_f32, splat, store

FEWEST = 96  # of a group: many threads share a strip, and each turns it for itself
ROWS, VECTORS = 12, 2  # of a tile: 24 sums, two vectors of the strip and a word of the row are 27 of 32 registers
OUTPUTS = VECTORS * LANES
PACKED_BYTES = 64 << 10  # of rows that one thread narrows: to wake another takes as long
ZERO = np.float32(0)


@inline
def results_of_strip(job: Any) -> int:
    """A strip of gated results holds 16 gates and their ups."""
    return LANES if job.ups > 0 else OUTPUTS


@inline
def count_strips(job: Any) -> int:
    return (job.results + results_of_strip(job) - 1) // results_of_strip(job)


def functions(size: int) -> Any:
    """`prepare(job, threads) -> blocks`, `pack(job, index)` and `multiply(job, index)` of strips, for `gemm.kernel`."""
    narrow, finish_vector = narrower(size), finisher(size)
    tile = multiply_tile(ROWS, VECTORS, size)

    @inline
    def prepare(job: Any, threads: int) -> int:
        rows, width, strips = job.rows, job.width, count_strips(job)
        groups = max(1, min((4 * threads + strips - 1) // strips, rows // FEWEST))
        job.group = (rows + groups * ROWS - 1) // (groups * ROWS) * ROWS
        whole = (rows + ROWS - 1) // ROWS * ROWS
        job.packed = malloc(whole * width * size + (rows + LANES) * 4)
        job.row_scales = job.packed + whole * width * size
        job.per_pack = max(1, PACKED_BYTES // (job.width * 4))
        job.packs = (rows + job.per_pack - 1) // job.per_pack
        return job.packs + strips * ((rows + job.group - 1) // job.group)

    @jit
    def pack(job: Any, index: int) -> None:
        width = job.width
        scratch, first = malloc(width * 4), index * job.per_pack
        for r in range(first, min(job.rows, first + job.per_pack)):
            narrow(job, r, job.packed + r * width * size, scratch)
        free(scratch)

    @jit
    def turn(w: int, words: int, strip: int, weight_sums: int) -> None:
        """Lay out 16 outputs of a strip; for int8 also sum their weights, by which results are corrected."""
        sums = splat(ZERO)
        for j in range(0, words, LANES):
            transpose(w + j * 4, words, strip + j * OUTPUTS * 4, OUTPUTS)
            if size == 1:
                for i in range(LANES):
                    sums = add_ints(sums, load_f32(strip, (j + i) * OUTPUTS))
        store(weight_sums, 0, sums)

    @jit
    def put(job: Any, sums: int, weight_sums: int, n: int, r: int, vectors: int) -> None:
        """The results of a tile, `vectors` of them in a row."""
        for i in range(min(ROWS, job.rows - r)):
            for v in range(vectors):
                at = v * LANES * 4
                finish_vector(job, sums + i * OUTPUTS * 4 + at, weight_sums + at, LANES * 4, r + i, n + v * LANES)

    @jit
    def multiply_strip(job: Any, index: int) -> None:
        strips, rows, ups = count_strips(job), job.group, job.ups
        n, words = index % strips * results_of_strip(job), job.width * size // 4
        begin = index // strips * rows
        vectors = VECTORS if ups > 0 else min(VECTORS, (job.results - n) // LANES)
        further = (ups if ups > 0 else LANES) * words * 4  # from a vector's weights to the next one's
        strip = malloc((words * OUTPUTS + ROWS * OUTPUTS + OUTPUTS) * 4)
        sums = strip + words * OUTPUTS * 4
        weight_sums = sums + ROWS * OUTPUTS * 4
        w = job.weight + n * words * 4
        for v in range(vectors):
            turn(w + v * further, words, strip + v * LANES * 4, weight_sums + v * LANES * 4)
        ahead = w + results_of_strip(job) * words * 4  # the next strip's weights, little by little
        lines = words // (rows // ROWS) + 1
        results = 1 if ups > 0 else vectors
        for r in range(begin, min(job.rows, begin + rows), ROWS):
            tile(strip, job.packed + r * words * 4, words, sums)
            put(job, sums, weight_sums, n, r, results)
            for _ in range(lines):
                for v in range(VECTORS):
                    prefetch(ahead + v * further)
                ahead += 64
        free(strip)

    return prepare, pack, multiply_strip
