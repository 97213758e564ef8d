"""Rows times a matrix of four, six or eight bits, or of a codebook, in groups: rows become 8-bit integers with a scale
for each group of inputs.

A group's products are exact integers, and groups are added in their order, so a row's results are the same to the last
bit in any batch. Few rows read the matrix as fast as memory gives it. Tiles of 12 rows unpack it on the way, a tenth of
their work; for more than a few tiles it is unpacked before. Processors with AMX multiply 16 rows and more by it
(`int4_amx`), and where a caller allows it, more rows as bfloat16 (`int4_widened`).

Milliseconds of CPU time on one core, 5120 x 960 twice, the least of 12 in turn, on a busy machine with VNNI:

    rows                      1      4     16     64    512
    int8                   0.58   1.17   1.10   2.62   20.8
    groups of 64           0.29   0.34   0.87   3.02   24.9
    groups of 32           0.31   0.39   1.13   3.73   31.0

By AMX, milliseconds of two cores of a busy Xeon, groups of 64, the least of 12 in turn; int8 is XLA's from 64 rows on:

    5120 x 960, rows         12     16     32     64    512
    AMX                    0.32   0.25   0.38   0.62    5.1
    VNNI                   0.19   0.25   0.46   0.80   11.1
    int8                   0.32   0.28   0.39   0.57    4.5

A random model of 360M parameters in a session without AMX, two busy cores, medians in turn, as shares of int8's
tokens/s: one stream 2.0 (groups of 32: 2.1), eight streams 1.6 (1.5), a prompt of 1,024 tokens 0.9 (0.8).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rekindle_kernels.int4_format import (
    BITS,
    CODEBOOKS,
    CODES,
    COLUMNS,
    INPUTS_OF,
    OFFSET,
    SCALE_BYTES,
    SIX_OFFSET,
    SPAN,
    STEP_BYTES,
    STEPPED,
)
from rekindle_kernels.native import cpu
from rekindle_kernels.native.cpu import has_feature
from rekindle_kernels.native.kernel_table import GROUPED, GROUPED_SMALLEST
from rekindle_kernels.native.kernels import int4_amx, int4_widened
from rekindle_kernels.native.kernels.int4_tile import (
    BACK,
    BEGIN,
    HALF_STEP,
    MAGIC,
    MAGIC_BITS,
    NUMBERS,
    SCALE,
    SIGNED,
    STEP,
    UNPACKED,
    VALUES,
    Codebook,
    best_instruction,
    multiply_tile,
    unpacker,
)
from rekindle_kernels.native.kernels.norms_and_gates import normalise
from rekindle_kernels.native.kernels.operands import (
    ROW_FIELDS,
    ROW_NUMBERS,
    describe_rows,
    first_row,
    free_packed,
    row_of,
)
from rekindle_kernels.native.language import amx
from rekindle_kernels.native.language.dot_products import store_i8
from rekindle_kernels.native.language.handler import Kernel, first_unit, job_layout, wait_for_blocks
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import LINE, f32, free, i32, malloc, set_f32, set_i32
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
    total,
)
from rekindle_kernels.native.language.vector_math import silu

ROWS = 12  # of a large tile, which has two blocks of outputs: 24 sums in registers
AT_ONCE = 4  # rows that are packed by the calling thread: to wake another takes as long
PACKED_BYTES = 64 << 10  # of rows that a block packs
BLOCK_BYTES = 384 << 10  # of weights that a block reads, where rows are few
FEWEST = 96  # rows of a group, where several blocks have the same weights
SEVERAL = 3 * ROWS  # rows for which weights are unpacked into memory
TILED = 16  # rows from which AMX is faster, where it is there
ZERO, ONE, TINY, TOP = np.float32(0), np.float32(1), np.float32(1e-30), np.float32(127)
MINUS_MAGIC = np.float32(-MAGIC)

JOB = job_layout(
    "int4",
    {
        **ROW_FIELDS,
        "width": "inputs",
        "packed": "the rows as they are multiplied",
        "stride": "bytes of a packed row",
        "per_pack": "rows that a block packs",
        "packs": "blocks that pack; those that multiply follow",
        "minimum": "or 0",
        "offset": "what is stored is more than the integers",
        "block_bytes": "of the weights of 16 outputs",
        "scale_bytes": "of their scales",
        "groups": "of inputs",
        "steps": "of a group, `Int4Form.step` tiles each",
        "ups": "blocks of outputs before the first up, or 0",
        "parts": "into which the outputs are cut",
        "group": "rows that a block multiplies",
        "tiles": "1 where many rows are multiplied by AMX, 2 where they are bfloat16 then",
    },
    "weight scale",
    numbers=ROW_NUMBERS,
)


@inline
def blocks_of(job: Any) -> int:
    """Return how many blocks of 16 outputs the matrix has: gates and ups, or results."""
    return job.results // LANES + job.ups


@jit
def pack_row(job: Any, r: int, scratch: int) -> None:
    """Row r, normed, as 8-bit integers, and the numbers of its groups; or as bfloat16."""
    width, groups = job.width, job.groups
    x, out = job.x + row_of(job, r) * width * 4, job.packed + r * job.stride
    if job.norm > 0:
        normalise(x, job.norm, job.eps, width, scratch)
        x = scratch
    if job.tiles == 2:
        int4_widened.store_row(x, job.packed, r, width)
        return
    group, numbers = width // groups, out + width
    for g in range(groups):
        begin = g * group
        highest = splat(TINY)
        for k in range(begin, begin + group, LANES):
            highest = larger_magnitude(highest, load_f32(x, k))
        set_f32(numbers, SCALE * groups + g, largest_magnitude(highest) / TOP)
        set_i32(numbers, SCALE * groups + g, (i32(numbers, SCALE * groups + g) + 3) & -4)  # 22 bits, rounded up
        scale = f32(numbers, SCALE * groups + g)
        factor, sums = splat(ONE / scale), splat(ZERO)
        for k in range(begin, begin + group, LANES):
            integers = nearest(multiply(load_f32(x, k), factor))
            sums = add(sums, integers)
            store_i8(out, k, integers)
        whole = total(sums)
        set_i32(numbers, BEGIN * groups + g, MAGIC_BITS - job.offset * int(whole))
        set_f32(numbers, VALUES * groups + g, scale * whole)
        set_f32(numbers, BACK * groups + g, MINUS_MAGIC * scale)


@jit
def pack_rows(job: Any, first: int, end: int) -> None:
    scratch = malloc(job.width * 4)
    for r in range(first, end):
        pack_row(job, r, scratch)
    free(scratch)


@inline
def finish_vector(job: Any, sums: int, ups: int, r: int, block: int) -> None:
    """Write 16 results of row r from the sums at `sums`, and from the sums of its ups at `ups` if it has any."""
    at = (row_of(job, r) * job.results + block * LANES) * 4
    y = load_f32(sums, 0)
    if job.ups > 0:
        y = multiply(silu(y), load_f32(ups, 0))
    if job.residual > 0:
        y = add(y, load_f32(job.residual + at, 0))
    store(job.out + at, 0, y)


@jit
def put(job: Any, block: int, first: int, count: int, sums: int, behind: int) -> None:
    """Write the results of `count` rows. The up projection's sums start `behind` bytes after the gate's."""
    for i in range(count):
        here = sums + i * LANES * 4
        finish_vector(job, here, here + behind, first + i, block)


class Int4Form(NamedTuple):
    """The choices made before a kernel is compiled; every function below is compiled for each combination."""

    dtype: str  # of the scales
    weight: str  # the dtype of the weights
    bits: int
    instruction: str  # that multiplies 8-bit integers
    offset: int  # what is stored is more than the integers, where there are no minimums or it has more than four bits
    large: bool  # has tiles of ROWS rows and two blocks of outputs
    tiled: bool  # has code for AMX; a caller says whether it runs
    codebook: Codebook  # its values plus `offset`, as unsigned bytes
    step: int  # tiles that are read one after the other: those of the smallest group

    @classmethod
    def of(cls, dtype: str, weight: str, *, smallest: bool = False) -> Int4Form:
        """Return the form for the processor that is compiled for."""
        bits, instruction = BITS[weight], best_instruction()
        offset = {4: OFFSET, 6: SIX_OFFSET, 8: 0 if instruction in SIGNED else 128}[bits]
        values = CODEBOOKS[dtype] if weight == CODES else ()
        if values:
            offset = 0 if instruction in SIGNED else -min(values)
        large = instruction == "vnni"
        tiled = large and (cpu.building_for is not None or has_feature("amx-int8"))
        codebook = tuple((value + offset) & 0xFF for value in values)
        step = HALF_STEP if smallest else STEP[bits]
        return cls(dtype, weight, bits, instruction, offset, large, tiled, codebook, step)

    def tile(self, rows: int, blocks: int, *, prefetches: bool = False, unpacked: bool = False) -> Any:
        """Return the code that multiplies so many rows by so many blocks of outputs, as this form stores them."""
        stored = {"scale": self.dtype, "bits": self.bits, "step": self.step, "codebook": self.codebook}
        return multiply_tile(rows, blocks, self.instruction, **stored, prefetches=prefetches, unpacked=unpacked)


class Units(NamedTuple):
    """How the outputs are shared out among blocks of work."""

    size: Any  # (job) -> blocks of results that are multiplied together
    count: Any  # (job) -> how many such units there are


def units_of(form: Int4Form) -> Units:
    """Return the functions that share out the outputs."""
    large = form.large

    @inline
    def paired(job: Any) -> bool:
        """True if blocks of outputs are multiplied two by two."""
        return large and (job.tiles > 0 or job.ups > 0 or job.rows >= ROWS)

    @inline
    def size(job: Any) -> int:
        return 2 if paired(job) and job.ups == 0 else 1

    @inline
    def count(job: Any) -> int:
        return (job.results // LANES + size(job) - 1) // size(job)

    return Units(size, count)


def job_reader(form: Int4Form) -> Any:
    """Return `read(frame, job)`, which notes in the job what the operands say."""
    bits, offset, stepped = form.bits, form.offset, form.dtype == STEPPED
    columns, word, scale_word = COLUMNS[form.weight], np.dtype(form.weight).itemsize, SCALE_BYTES[form.dtype]
    step_inputs = form.step * INPUTS_OF[bits]

    @inline
    def read(frame: Any, job: Any) -> None:
        describe_rows(frame, job)
        job.width = dim(frame.weight, 1) // columns
        job.ups = job.results // LANES if frame.settings.gated > 0 else 0
        job.block_bytes = dim(frame.weight, 1) * word
        job.scale_bytes = dim(frame.scale, 1) * scale_word
        first = first_row(frame, blocks_of(job))
        job.weight = frame.weight.data + first * job.block_bytes
        job.scale = frame.scale.data + first * job.scale_bytes
        job.minimum = frame.minimum.data + first * job.scale_bytes if frame.has_minimum else 0
        job.offset = offset if bits > 4 or job.minimum == 0 else 0
        job.groups = dim(frame.scale, 1) // LANES
        if stepped:  # with steps between them
            job.groups = job.groups - job.width // SPAN * STEP_BYTES
        job.steps = job.width // (job.groups * step_inputs)

    return read


def planner(form: Int4Form, units: Any) -> Any:
    """Return `prepare(frame, job, threads)`: blocks that pack rows, then blocks that multiply."""
    tiled, read = form.tiled, job_reader(form)

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        read(frame, job)
        rows = job.rows
        # The instruction, and the rows as they are packed for it.
        job.tiles = 0
        if tiled and rows >= TILED and frame.settings.amx > 0:
            job.tiles = amx.allowed()
        widens = frame.settings.widened > 0 and int4_widened.is_faster(rows, job.width // job.groups)
        if job.tiles > 0 and widens and job.width % int4_widened.DEPTH == 0:
            job.tiles = 2
        step = int4_amx.ROWS if job.tiles > 0 else ROWS
        job.stride = (job.width + 4 * NUMBERS * job.groups + LINE - 1) // LINE * LINE
        if job.tiles == 2:
            job.stride = job.width * 2
        job.packed = malloc((rows + step - 1) // step * step * job.stride)  # the last tile is whole
        job.per_pack = max(1, PACKED_BYTES // (job.width * 4))
        if rows <= AT_ONCE:
            pack_rows(job, 0, rows)
            job.packs = 0
        else:
            job.packs = (rows + job.per_pack - 1) // job.per_pack
        # Parts of the outputs, and groups of rows where many have the same weights.
        nbytes = blocks_of(job) * job.block_bytes
        rounds = (nbytes + threads * BLOCK_BYTES - 1) // (threads * BLOCK_BYTES)
        if rows >= ROWS:
            rounds = max(rounds, 4)
        parts = min(rounds * threads, units(job))
        job.parts = parts
        groups = max(1, min(4 * threads // max(1, parts), rows // FEWEST))
        if job.tiles == 2:
            groups = max(groups, (rows * job.stride + int4_widened.CACHED - 1) // int4_widened.CACHED)
        job.group = (rows + groups * step - 1) // (groups * step) * step
        if rows == 0:
            return 0
        return job.packs + parts * ((rows + job.group - 1) // job.group)

    return prepare


def few_rows(form: Int4Form) -> Any:
    """Return `few(job, block, first, end, sums)`: the rows [first, end) times one block of outputs."""
    one, two, four = (form.tile(rows, 1, prefetches=True) for rows in (1, 2, 4))

    @jit
    def few(job: Any, block: int, first: int, end: int, sums: int) -> None:
        """Sums are [rows, 16]."""
        weight, scale = job.weight + block * job.block_bytes, job.scale + block * job.scale_bytes
        minimum = job.minimum + block * job.scale_bytes if job.minimum > 0 else 0
        stride, groups, steps, r = job.stride, job.groups, job.steps, first
        while r < end:
            x, here = job.packed + r * stride, sums + (r - first) * LANES * 4
            if r + 4 <= end:
                four(weight, scale, minimum, 0, 0, x, stride, groups, steps, here)
                r += 4
            elif r + 2 <= end:
                two(weight, scale, minimum, 0, 0, x, stride, groups, steps, here)
                r += 2
            else:
                one(weight, scale, minimum, 0, 0, x, stride, groups, steps, here)
                r += 1

    return few


def twelve_rows(form: Int4Form) -> Any:
    """Return `twelve(job, block, behind, r, sums, strip)`, which multiplies ROWS rows by two blocks of outputs.

    The blocks are `block` and `block + behind`. Their weights are read from `strip`, where they lie unpacked, or as
    they are stored if `strip` is 0.
    """
    many, many_unpacked = (form.tile(ROWS, 2, unpacked=ahead) if form.large else None for ahead in (False, True))

    @jit
    def twelve(job: Any, block: int, behind: int, r: int, sums: int, strip: int) -> None:
        """Sums are [2, ROWS, 16]."""
        weight, scale = job.weight + block * job.block_bytes, job.scale + block * job.scale_bytes
        minimum = job.minimum + block * job.scale_bytes if job.minimum > 0 else 0
        further, further_scales = behind * job.block_bytes, behind * job.scale_bytes
        x, stride = job.packed + r * job.stride, job.stride
        if strip > 0:
            many_unpacked(strip, scale, minimum, 0, further_scales, x, stride, job.groups, job.steps, sums)
        else:
            many(weight, scale, minimum, further, further_scales, x, stride, job.groups, job.steps, sums)

    return twelve


def row_multiplier(form: Int4Form) -> Any:
    """Return `multiply_rows(job, block, behind, first, end, sums, memory)`: the rows [first, end) times one block of
    results, and the next one if `behind` is 1 and nothing is gated."""
    large, few, twelve, unpack = form.large, few_rows(form), twelve_rows(form), unpacker(form.bits, 0, form.codebook)

    @jit
    def multiply_rows(job: Any, block: int, behind: int, first: int, end: int, sums: int, memory: int) -> None:
        r, ups = first, job.ups
        half = ROWS * LANES * 4
        if large and behind > 0:
            strip = 0
            if first + SEVERAL <= end:
                strip = memory
                unpack(job.weight + block * job.block_bytes, strip, job.width)
                unpack(job.weight + (block + behind) * job.block_bytes, strip + LANES * 4, job.width)
            while r + ROWS <= end:
                twelve(job, block, behind, r, sums, strip)
                put(job, block, r, ROWS, sums, half)
                if ups == 0:
                    put(job, block + behind, r, ROWS, sums + half, 0)
                r += ROWS
        while r < end:
            count = min(8, end - r)
            few(job, block, r, r + count, sums)
            if behind > 0:
                few(job, block + behind, r, r + count, sums + half)
            put(job, block, r, count, sums, half)
            if behind > 0 and ups == 0:
                put(job, block + behind, r, count, sums + half, 0)
            r += count

    return multiply_rows


def part_by_tiles(form: Int4Form, share: Units, multiply_rows: Any) -> Any:
    """Return `by_tiles(job, part, first, end)`: a part of the outputs for the rows [first, end), by AMX."""
    unit, units = share
    stored = form.dtype, form.bits, form.offset, form.codebook
    multiply_tiles = int4_amx.multiplier(*stored, put) if form.tiled else None
    multiply_widened = int4_widened.multiplier(*stored, put, form.step) if form.tiled else None

    @jit
    def by_tiles(job: Any, part: int, first: int, end: int) -> None:
        size, ups, blocks, widened = unit(job), job.ups, job.results // LANES, job.tiles == 2
        memory = malloc(int4_widened.memory_for(end - first) if widened else int4_amx.memory_for(end - first))
        amx.begin(memory, amx.DEPTH if widened else min(amx.DEPTH, job.width // job.groups))
        for u in range(first_unit(part, job.parts, units(job)), first_unit(part + 1, job.parts, units(job))):
            at = u * size
            behind = ups if ups > 0 else 1 if at + 1 < blocks else 0
            following = job.weight + (at + size) * job.block_bytes if at + 2 * size <= blocks else 0
            if widened:
                multiply_widened(job, at, behind, first, end, memory, following)
            elif behind > 0:
                multiply_tiles(job, at, behind, first, end, memory, following)
            else:
                multiply_rows(job, at, 0, first, end, memory + int4_amx.INTEGERS, 0)
        amx.end(memory)
        free(memory)

    return by_tiles


def kernel(dtype: str, weight: str, *, smallest: bool = False) -> Kernel:
    """Return the kernel of rows times a matrix with these dtypes of scales and weights; with `smallest`, for groups of
    16 inputs only.
    """
    form = Int4Form.of(dtype, weight, smallest=smallest)
    large, tiled, share = form.large, form.tiled, units_of(form)
    (unit, units), multiply_rows = share, row_multiplier(form)
    by_tiles = part_by_tiles(form, share, multiply_rows)

    @jit
    def block(job: Any, index: int) -> None:
        packs, rows = job.packs, job.rows
        if index < packs:
            pack_rows(job, index * job.per_pack, min(rows, (index + 1) * job.per_pack))
            return
        wait_for_blocks(job, packs)  # blocks that multiply come last: by then every row is packed
        parts, size, ups = job.parts, unit(job), job.ups
        part, first = (index - packs) % parts, (index - packs) // parts * job.group
        if tiled and job.tiles > 0:
            by_tiles(job, part, first, min(rows, first + job.group))
            return
        last = job.results // LANES
        several = large and first + SEVERAL <= min(rows, first + job.group)
        sums = malloc(2 * ROWS * LANES * 4 + (job.width // 8 * UNPACKED if several else 0))
        strip = sums + 2 * ROWS * LANES * 4
        for u in range(first_unit(part, parts, units(job)), first_unit(part + 1, parts, units(job))):
            at = u * size
            behind = ups if ups > 0 else 1 if size == 2 and at + 1 < last else 0
            multiply_rows(job, at, behind, first, min(rows, first + job.group), sums, strip)
        free(sums)

    specs = GROUPED_SMALLEST if smallest else GROUPED
    return Kernel(specs[weight], JOB, planner(form, units), block, free_packed)
