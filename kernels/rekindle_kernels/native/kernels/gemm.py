"""Many rows times a 16-bit or 8-bit matrix, with the instructions that multiply two or four of them in a lane.

Rows are packed first (`gemm_packing`), then multiplied: by `gemm_amx` where the processor has AMX, else by
`gemm_panels`, and where there are hundreds of them by `gemm_strips`; by `gemm_widened` where no instruction is faster
than float32. XLA:CPU repacks the matrix for every product, and has no instruction for four int8.

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

from rekindle_kernels.native import cpu, kernel_table
from rekindle_kernels.native.cpu import has_feature, multiplies_widened, on_arm
from rekindle_kernels.native.kernels import gemm_amx, gemm_panels, gemm_strips, gemm_widened
from rekindle_kernels.native.kernels.gemm_packing import JOB, LEFT_OVER, describe
from rekindle_kernels.native.kernels.gemm_panels import list_rows_of_rank
from rekindle_kernels.native.language.amx import allowed
from rekindle_kernels.native.language.handler import Kernel, wait_for_blocks
from rekindle_kernels.native.language.jit import jit
from rekindle_kernels.native.language.memory import free
from rekindle_kernels.native.language.vector import LANES

FEW = LANES + LEFT_OVER  # rows of a product that prefetches what adapters read after it
ENOUGH = 160  # rows: to turn a strip costs what 8 to 16 of them do


def kernel(size: int, add: Any) -> Kernel:
    """Many rows times a matrix of numbers of `size` bytes; `add(a, x, w)` adds to the lanes of a the products of what a
    word of x and one of the weights hold. int8 rows get a scale each, and results are multiplied by it and by the
    output's."""
    if multiplies_widened("bfloat16" if size == 2 else "int8"):
        return _of_one_form(size, *gemm_widened.functions(size))
    prepare_panels, pack_panels, multiply_panels = gemm_panels.functions(size, add)
    if on_arm():  # strips are written for the registers of AVX-512
        return _of_one_form(size, prepare_panels, pack_panels, multiply_panels)
    prepare_strips, pack_rows, multiply_strip = gemm_strips.functions(size)
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

    @jit
    def block(job: Any, index: int) -> None:
        if index < job.packs:
            pack(job, index)
            return
        wait_for_blocks(job, job.packs)
        multiply(job, index - job.packs)

    @jit
    def finish(job: Any) -> None:
        free(job.packed)

    return Kernel(kernel_table.GEMM, JOB, prepare, block, finish)
