"""Many rows times a 16-bit or 8-bit matrix by AMX: rows in the panels of `gemm_packing`, the matrix as it is stored.

A tile register holds sixteen words of 16 outputs, just as they lie in the matrix, or of 16 rows, just as they lie in a
panel. One instruction adds to 16 x 16 sums what these multiply to; two registers of either give 32 outputs of 32 rows.
The matrix is read once, and nothing of it is turned or copied: XLA does that, and before the first product of each
program it thinks 2.4 ms about how (jax 0.10), which made 0.3 s of the first step of a model with 30 layers.

Milliseconds of two cores of a Xeon, for the products of 30 layers of the 135M model in bfloat16:

    rows               5     16     34    130    514
    XLA              9.9   10.2   14.0   28.1   77.7
    here             6.9    7.5   11.7   24.3   85.8

Products are added in another order than without AMX, so the last bits of 16-bit results differ.
"""

from __future__ import annotations

from typing import Any

from numba import types

from rekindle_kernels.native.kernels.gemm_packing import PANEL, count_packs, finisher, packer, panels_of
from rekindle_kernels.native.kernels.gemm_panels import OUTPUTS, SUMS, TURNED_AT
from rekindle_kernels.native.language.amx import (
    DEPTH,
    MEMORY,
    add_products,
    add_products_of_pairs,
    begin,
    end,
    load_tile,
    store_tile,
    stream_tile,
    zero_tile,
)
from rekindle_kernels.native.language.dot_products import transpose
from rekindle_kernels.native.language.handler import first_unit
from rekindle_kernels.native.language.jit import emits, inline, jit
from rekindle_kernels.native.language.memory import LINE, WORD, free, malloc, prefetch
from rekindle_kernels.native.language.vector import LANES

CACHED = 1 << 20  # bytes of rows that are multiplied together: they stay in the second cache
_OUTPUTS_AT, _ROWS_AT = 4, 6  # registers; those before have the sums


@inline
def units_of(job: Any) -> int:
    """Pairs of 16 outputs: neighbours, or where results are gated the gates and their ups."""
    return job.results // OUTPUTS if job.ups > 0 else (job.results // OUTPUTS + 1) // 2


def tile(blocks: int, vectors: int, size: int, *, streams: bool = False) -> Any:
    """Return `multiply(w, further, x, words, sums, ahead, low, high)`: 16 outputs at w, and 16 more `further` bytes
    after it if there are two blocks, times one or two vectors of a panel of rows. A block's sums are [16, PANEL]; the
    second block's lie SUMS bytes after the first's.

    Of the blocks that lie `ahead` bytes after these, the outputs `low` to `high` are prefetched meanwhile; none where
    `ahead` is 0. Without `streams` these are all of them, and the panel is kept in the first cache: that is for a
    single panel, and for a block of outputs without a pair.
    """
    add = add_products if size == 1 else add_products_of_pairs
    sums_at = [(2 * block + v, block, v) for block in range(blocks) for v in range(vectors)]

    @emits(types.void, types.int64)
    def clear(builder: Any, sums: Any) -> None:
        for register, _, _ in sums_at:
            zero_tile(builder, register)

    @emits(types.void, *[types.int64] * 4)
    def step(builder: Any, w: Any, row: Any, further: Any, x: Any) -> None:
        for v in range(vectors):
            load = stream_tile if streams else load_tile
            load(builder, _ROWS_AT + v, builder.add(x, WORD(v * LINE)), WORD(PANEL * 4))
        for block in range(blocks):
            load_tile(builder, _OUTPUTS_AT + block, builder.add(w, further) if block else w, row)
            for v in range(vectors):
                add(builder, 2 * block + v, _OUTPUTS_AT + block, _ROWS_AT + v)

    @emits(types.void, types.int64)
    def leave(builder: Any, sums: Any) -> None:
        for register, block, v in sums_at:
            store_tile(builder, register, builder.add(sums, WORD(block * SUMS + v * LINE)), WORD(PANEL * 4))

    @jit
    def multiply(w: int, further: int, x: int, words: int, sums: int, ahead: int, low: int, high: int) -> None:
        clear(sums)
        row = words * 4
        for j in range(0, words, LANES):
            step(w + j * 4, row, further, x + j * PANEL * 4)
            if ahead > 0:
                for i in range(low if streams else 0, high if streams else OUTPUTS):
                    prefetch(w + ahead + i * row + j * 4)
                    if blocks == 2:
                        prefetch(w + ahead + further + i * row + j * 4)
        leave(sums)

    return multiply


def functions(size: int) -> Any:
    """Return `prepare(job, threads) -> blocks`, `pack(job, index)` and `multiply(job, index)`, for `gemm.kernel`."""
    finish_vector = finisher(size, corrected=False)
    two_by_two, two_by_one, one_by_two, one_by_one = (tile(b, v, size) for b, v in ((2, 2), (2, 1), (1, 2), (1, 1)))
    streamed_two_by_two, streamed_two_by_one = (tile(2, vectors, size, streams=True) for vectors in (2, 1))

    @inline
    def prepare(job: Any, threads: int) -> int:
        rows, row = job.rows, job.width * size
        job.group = max(1, CACHED // (row * PANEL)) * PANEL
        groups = max(1, (rows + job.group - 1) // job.group)
        job.parts = min(units_of(job), (4 * threads + groups - 1) // groups)
        words = row // 4 * panels_of(job) * PANEL
        job.packed = malloc((words + rows + LANES) * 4)
        job.row_scales = job.packed + words * 4
        return count_packs(job) + groups * job.parts

    @jit
    def put(job: Any, sums: int, n: int, r: int) -> None:
        """The results of 16 rows from r on for 16 outputs from n on."""
        turned = sums + TURNED_AT
        transpose(sums + (r % PANEL) * 4, PANEL, turned, OUTPUTS)
        if job.ups > 0:
            transpose(sums + SUMS + (r % PANEL) * 4, PANEL, turned + SUMS, OUTPUTS)
        for i in range(min(LANES, job.rows - r)):
            finish_vector(job, turned + i * OUTPUTS * 4, 0, SUMS, r + i, n)

    @inline
    def multiply_panel(
        w: int, further: int, x: int, words: int, sums: int, ahead: int, panel: int, panels: int, two: bool, both: bool
    ) -> None:
        """Multiply a panel, and prefetch its share of the weights that lie `ahead`: with all of them prefetched by the
        first panel, it would wait for memory, and the others would leave memory idle."""
        low, high = panel * OUTPUTS // panels, (panel + 1) * OUTPUTS // panels
        once = ahead if panel == 0 else 0
        if two and panels > 1 and both:
            streamed_two_by_two(w, further, x, words, sums, ahead, low, high)
        elif two and panels > 1:
            streamed_two_by_one(w, further, x, words, sums, ahead, low, high)
        elif two and both:
            two_by_two(w, further, x, words, sums, ahead, 0, OUTPUTS)
        elif two:
            two_by_one(w, further, x, words, sums, ahead, 0, OUTPUTS)
        elif both:
            one_by_two(w, further, x, words, sums, once, 0, OUTPUTS)
        else:
            one_by_one(w, further, x, words, sums, once, 0, OUTPUTS)

    @jit
    def multiply(job: Any, index: int) -> None:
        ups, words, units, parts = job.ups, job.width * size // 4, units_of(job), job.parts
        group, part = index // parts, index % parts
        outputs = OUTPUTS if ups > 0 else 2 * OUTPUTS  # from a unit to the next one
        further = (ups if ups > 0 else OUTPUTS) * words * 4
        first, last = group * job.group, min(job.rows, (group + 1) * job.group)
        panels = (last - first + PANEL - 1) // PANEL
        shapes = malloc(MEMORY)
        begin(shapes, DEPTH)
        sums = malloc(2 * SUMS)
        for unit in range(first_unit(part, parts, units), first_unit(part + 1, parts, units)):
            n = unit * outputs
            two = ups > 0 or n + OUTPUTS < job.results
            for panel in range(panels):
                r = first + panel * PANEL
                both = r + LANES < last
                w, x = job.weight + n * words * 4, job.packed + r * words * 4
                multiply_panel(w, further, x, words, sums, outputs * words * 4, panel, panels, two, both)
                for v in range(2 if both else 1):
                    put(job, sums, n, r + v * LANES)
                    if ups == 0 and two:
                        put(job, sums + SUMS, n + OUTPUTS, r + v * LANES)
        free(sums)
        end(shapes)
        free(shapes)

    return prepare, packer(size, signed=True), multiply
