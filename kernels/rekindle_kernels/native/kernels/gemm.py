"""Many rows times a matrix, with the instructions that multiply two or four of its numbers in a lane.

Rows are packed first (`gemm_packing`), then multiplied: by `gemm_amx` where the processor has AMX, else by
`gemm_panels`, and where there are hundreds of them in strips; by `gemm_widened` where no instruction is faster
than float32, and where numbers are float32. XLA:CPU repacks the matrix for every product, and has no instruction for
four int8.

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

from rekindle_kernels.native import cpu, kernel_table
from rekindle_kernels.native.cpu import has_feature, multiplies_widened, on_arm
from rekindle_kernels.native.kernels import gemm_amx, gemm_panels, gemm_widened
from rekindle_kernels.native.kernels.gemm_packing import JOB, LEFT_OVER, describe, finisher, narrower, packed_first
from rekindle_kernels.native.kernels.gemm_panels import list_rows_of_rank
from rekindle_kernels.native.language.amx import allowed
from rekindle_kernels.native.language.dot_products import add_ints, transpose
from rekindle_kernels.native.language.handler import Kernel, wait_for_blocks
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import free, malloc, prefetch
from rekindle_kernels.native.language.vector import LANES, load_f32, splat, store

FEW = LANES + LEFT_OVER  # rows of a product that prefetches what adapters read after it
ENOUGH = 160  # rows: to turn a strip costs what 8 to 16 of them do


def kernel(size: int, add: Any) -> Kernel:
    """Return the kernel of many rows times a matrix with numbers of `size` bytes.

    `add(a, x, w)` multiplies the numbers in each word of x by the numbers in a word of the weights, and adds the
    products to the lanes of a. Each int8 row gets a scale; results are multiplied by it and by the output's scale.
    """
    if multiplies_widened({1: "int8", 2: "bfloat16", 4: "float32"}[size]):
        return _of_one_form(size, *gemm_widened.functions(size))
    prepare_panels, pack_panels, multiply_panels = gemm_panels.functions(size, add)
    if on_arm():  # strips are written for the registers of AVX-512
        return _of_one_form(size, prepare_panels, pack_panels, multiply_panels)
    prepare_strips, pack_rows, multiply_strip = strip_functions(size)
    prepare_tiles, pack_for_tiles, multiply_by_tiles = gemm_amx.functions(size)
    # Whether the code for AMX is there; a caller says whether it runs.
    may_be_tiled = cpu.building_for is not None or has_feature("amx-int8")

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        describe(frame, job, size)
        job.striped = 0
        if may_be_tiled and frame.settings.amx > 0 and allowed() > 0:
            job.tiled = 1
            return prepare_tiles(job, threads)
        job.striped = 1 if job.rows >= ENOUGH else 0
        if frame.has_slots and job.rows <= FEW:
            list_rows_of_rank(frame, job, size)
        return prepare_strips(job, threads) if job.striped > 0 else prepare_panels(job, threads)

    @jit
    def block(job: Any, index: int) -> None:
        packs, striped = job.packs, job.striped > 0
        tiled = may_be_tiled and job.tiled > 0
        if index < packs:
            if tiled:
                pack_for_tiles(job, index)
            elif striped:
                pack_rows(job, index)
            else:
                pack_panels(job, index)
            return
        wait_for_blocks(job, packs)  # blocks that multiply come last: by then every row is packed
        if tiled:
            multiply_by_tiles(job, index - packs)
        elif striped:
            multiply_strip(job, index - packs)
        else:
            multiply_panels(job, index - packs)

    @jit
    def finish(job: Any) -> None:
        free(job.packed)
        if job.wanted > 0:
            free(job.wanted)

    return Kernel(kernel_table.GEMM, JOB, prepare, block, finish)


def _of_one_form(size: int, prepare_rows: Any, pack: Any, multiply: Any) -> Kernel:
    """Return the kernel that multiplies any number of rows in the same way."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        describe(frame, job, size)
        return prepare_rows(job, threads)

    return packed_first(prepare, pack, multiply)


# Hundreds of rows times a 16-bit or 8-bit matrix: strips of the matrix are turned, and every row passes over them.
#
# A strip is 32 outputs, laid out so that a load fills a vector with the words of 16 of them. A word of a row, spread
# over a vector, multiplies two such vectors, and 12 rows times 32 outputs stay in registers until they are done: they
# come out as they are stored. In `gemm_panels` it is the rows that are turned, in memory, and so are the results. To
# turn a strip costs what 8 to 16 rows do.
#
# 1,024 tokens, 135M bfloat16, milliseconds of CPU time     panels   strips
#     one thread                                               594      567
#     two, in a minute in which memory was slow                791      619

FEWEST = 96  # of a group: many threads share a strip, and each turns it for itself
STRIP_ROWS, VECTORS = 12, 2  # of a tile: 24 sums, two vectors of the strip and a word of the row are 27 of 32 registers
STRIP_OUTPUTS = VECTORS * LANES
PACKED_BYTES = 64 << 10  # of rows that one thread narrows: to wake another takes as long
ZERO = np.float32(0)


@inline
def results_of_strip(job: Any) -> int:
    """Return a strip of gated results holds 16 gates and their ups."""
    return LANES if job.ups > 0 else STRIP_OUTPUTS


@inline
def count_strips(job: Any) -> int:
    return (job.results + results_of_strip(job) - 1) // results_of_strip(job)


def strip_functions(size: int) -> Any:
    """Return `prepare(job, threads) -> blocks`, `pack(job, index)` and `multiply(job, index)` of strips, for
    `kernel`."""
    narrow, finish_vector = narrower(size), finisher(size)
    add = gemm_widened.Instructions(
        "vpbroadcastd", ("vpdpbusd {1}, {2}, {0}" if size == 1 else "vdpbf16ps {1}, {2}, {0}",)
    )
    form = gemm_widened.WidenedForm(size, 1, add, True, LANES, STRIP_ROWS, STRIP_ROWS, panel=1)
    tile = gemm_widened.multiply_tile(form, STRIP_ROWS, STRIP_OUTPUTS, align=64, asks=False)

    @inline
    def prepare(job: Any, threads: int) -> int:
        rows, width, strips = job.rows, job.width, count_strips(job)
        groups = max(1, min((4 * threads + strips - 1) // strips, rows // FEWEST))
        job.group = (rows + groups * STRIP_ROWS - 1) // (groups * STRIP_ROWS) * STRIP_ROWS
        whole = (rows + STRIP_ROWS - 1) // STRIP_ROWS * STRIP_ROWS
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
        """Lay out 16 outputs of a strip; for int8 also sum their weights, to correct the results."""
        sums = splat(ZERO)
        for j in range(0, words, LANES):
            transpose(w + j * 4, words, strip + j * STRIP_OUTPUTS * 4, STRIP_OUTPUTS)
            if size == 1:
                for i in range(LANES):
                    sums = add_ints(sums, load_f32(strip, (j + i) * STRIP_OUTPUTS))
        store(weight_sums, 0, sums)

    @jit
    def put(job: Any, sums: int, weight_sums: int, n: int, r: int, vectors: int) -> None:
        """The results of a tile, `vectors` of them in a row."""
        for i in range(min(STRIP_ROWS, job.rows - r)):
            for v in range(vectors):
                at = v * LANES * 4
                finish_vector(job, sums + i * STRIP_OUTPUTS * 4 + at, weight_sums + at, LANES * 4, r + i, n + v * LANES)

    @jit
    def multiply_strip(job: Any, index: int) -> None:
        strips, rows, ups = count_strips(job), job.group, job.ups
        n, words = index % strips * results_of_strip(job), job.width * size // 4
        begin = index // strips * rows
        vectors = VECTORS if ups > 0 else min(VECTORS, (job.results - n) // LANES)
        further = (ups if ups > 0 else LANES) * words * 4  # from a vector's weights to the next one's
        strip = malloc((words * STRIP_OUTPUTS + STRIP_ROWS * STRIP_OUTPUTS + STRIP_OUTPUTS) * 4)
        sums = strip + words * STRIP_OUTPUTS * 4
        weight_sums = sums + STRIP_ROWS * STRIP_OUTPUTS * 4
        w = job.weight + n * words * 4
        for v in range(vectors):
            turn(w + v * further, words, strip + v * LANES * 4, weight_sums + v * LANES * 4)
        ahead = w + results_of_strip(job) * words * 4  # the next strip's weights, little by little
        lines = words // (rows // STRIP_ROWS) + 1
        results = 1 if ups > 0 else vectors
        for r in range(begin, min(job.rows, begin + rows), STRIP_ROWS):
            tile(strip, job.packed + r * words * 4, words, sums, 0, 0)
            put(job, sums, weight_sums, n, r, results)
            for _ in range(lines):
                for v in range(VECTORS):
                    prefetch(ahead + v * further)
                ahead += 64
        free(strip)

    return prepare, pack, multiply_strip
