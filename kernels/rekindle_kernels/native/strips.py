"""Hundreds of rows times a 16-bit or 8-bit matrix: strips of the matrix are turned, and every row passes over them.

A strip is 32 outputs, laid out so that a load fills a vector with the words of 16 of them. A word of a row, spread over
a vector, multiplies two such vectors, and 12 rows times 32 outputs stay in registers until they are done: they come out
as they are stored. In `panels` it is the rows that are turned, in memory, and so are the results. To turn a strip costs
what 8 to 16 rows do.

1,024 tokens, 135M bfloat16, milliseconds of CPU time     panels   strips
    one thread                                               594      567
    two, in a minute in which memory was slow                791      619
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native.memory import free, malloc, prefetch
from rekindle_kernels.native.packing import (
    GROUP,
    PACKS,
    PANELS,
    PER_PACK,
    SCALES,
    UPS,
    WEIGHT,
    WIDTH,
    K,
    R,
    finisher,
    narrower,
)
from rekindle_kernels.native.target import field, inline, jit, set_field
from rekindle_kernels.native.tile import multiply_tile
from rekindle_kernels.native.vector import LANES, load_f32, splat, store
from rekindle_kernels.native.words import add_ints, transpose

ENOUGH = 160  # rows
FEWEST = 96  # of a group: many threads share a strip, and each turns it for itself
ROWS, VECTORS = 12, 2  # of a tile: 24 sums, two vectors of the strip and a word of the row are 27 of 32 registers
OUTPUTS = VECTORS * LANES
PACKED_BYTES = 64 << 10  # of rows that one thread narrows: to wake another takes as long
ZERO = np.float32(0)


@inline
def results_of_strip(job: int) -> int:
    """A strip of gated results holds 16 gates and their ups."""
    return LANES if field(job, UPS) > 0 else OUTPUTS


@inline
def count_strips(job: int) -> int:
    return (field(job, WIDTH) + results_of_strip(job) - 1) // results_of_strip(job)


def functions(size: int) -> Any:
    """`prepare(job, threads) -> blocks`, `pack(job, index)` and `multiply(job, index)` of `panels.kernel`."""
    narrow, finish_vector = narrower(size), finisher(size)
    tile = multiply_tile(ROWS, VECTORS, size)

    @inline
    def prepare(job: int, threads: int) -> int:
        rows, width, strips = field(job, R), field(job, K), count_strips(job)
        groups = max(1, min((4 * threads + strips - 1) // strips, rows // FEWEST))
        set_field(job, GROUP, (rows + groups * ROWS - 1) // (groups * ROWS) * ROWS)
        whole = (rows + ROWS - 1) // ROWS * ROWS
        set_field(job, PANELS, malloc(whole * width * size + (rows + LANES) * 4))
        set_field(job, SCALES, field(job, PANELS) + whole * width * size)
        set_field(job, PER_PACK, max(1, PACKED_BYTES // (field(job, K) * 4)))
        set_field(job, PACKS, (rows + field(job, PER_PACK) - 1) // field(job, PER_PACK))
        return field(job, PACKS) + strips * ((rows + field(job, GROUP) - 1) // field(job, GROUP))

    @jit
    def pack(job: int, index: int) -> None:
        width = field(job, K)
        scratch, first = malloc(width * 4), index * field(job, PER_PACK)
        for r in range(first, min(field(job, R), first + field(job, PER_PACK))):
            narrow(job, r, field(job, PANELS) + r * width * size, scratch)
        free(scratch)

    @jit
    def turn(w: int, words: int, strip: int, offsets: int) -> None:
        """16 outputs of a strip; for int8 also the sums of their weights."""
        sums = splat(ZERO)
        for j in range(0, words, LANES):
            transpose(w + j * 4, words, strip + j * OUTPUTS * 4, OUTPUTS)
            if size == 1:
                for i in range(LANES):
                    sums = add_ints(sums, load_f32(strip, (j + i) * OUTPUTS))
        store(offsets, 0, sums)

    @jit
    def put(job: int, sums: int, offsets: int, n: int, r: int, vectors: int) -> None:
        """The results of a tile, `vectors` of them in a row."""
        for i in range(min(ROWS, field(job, R) - r)):
            for v in range(vectors):
                at = v * LANES * 4
                finish_vector(job, sums + i * OUTPUTS * 4 + at, offsets + at, LANES * 4, r + i, n + v * LANES)

    @jit
    def multiply_strip(job: int, index: int) -> None:
        strips, rows, ups = count_strips(job), field(job, GROUP), field(job, UPS)
        n, words = index % strips * results_of_strip(job), field(job, K) * size // 4
        begin = index // strips * rows
        vectors = VECTORS if ups > 0 else min(VECTORS, (field(job, WIDTH) - n) // LANES)
        further = (ups if ups > 0 else LANES) * words * 4  # from a vector's weights to the next one's
        strip = malloc((words * OUTPUTS + ROWS * OUTPUTS + OUTPUTS) * 4)
        sums = strip + words * OUTPUTS * 4
        offsets = sums + ROWS * OUTPUTS * 4
        w = field(job, WEIGHT) + n * words * 4
        for v in range(vectors):
            turn(w + v * further, words, strip + v * LANES * 4, offsets + v * LANES * 4)
        ahead = w + results_of_strip(job) * words * 4  # the next strip's weights, little by little
        lines = words // (rows // ROWS) + 1
        results = 1 if ups > 0 else vectors
        for r in range(begin, min(field(job, R), begin + rows), ROWS):
            tile(strip, field(job, PANELS) + r * words * 4, words, sums)
            put(job, sums, offsets, n, r, results)
            for _ in range(lines):
                for v in range(VECTORS):
                    prefetch(ahead + v * further)
                ahead += 64
        free(strip)

    return prepare, pack, multiply_strip
