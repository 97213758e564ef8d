"""Many rows times a matrix on processors that multiply no two of its numbers in a lane, or slowly.

Strips of 16 outputs are turned, as in `gemm`, and widened: bfloat16 to float32, which stays what it is, as rows do,
and int8 to pairs of 16 bits. With AVX2, six rows times 16 outputs stay in registers: twelve sums, two vectors of
the strip, a word of the row, and one to spare are all sixteen. With AVX-VNNI, int8 is multiplied four by four as it is.
With AVX-512, 24 rows times 16 outputs do: 24 sums and a vector of the strip, which is multiplied by words in memory.

GFLOP/s, 2 cores of a Xeon, by processor time, XLA's from a process in which CPUID says AVX2 (`older_processor.py`):

                                        XLA   here   AVX-VNNI
    bfloat16   512 x 3072 x 576         148    213
                32 x 3072 x 576         124    167
    int8       512 x 3072 x 576         237    339        871
                32 x 3072 x 576         200    274

The same with AVX-512, 2 cores of another Xeon (Emerald Rapids, AMX hidden), where XLA and the strips of `gemm` multiply
pairs of bfloat16; best of 30:

                                        XLA   strips   here
    bfloat16   512 x 3072 x 576         161      161    284
               512 x 4096 x 1024        149      162    295
                64 x 3072 x 576         115      168    269

float32, where XLA packs the matrix for every product; one core of an EPYC (Zen 3) that had other work, medians of
turns: the time of XLA to that of here, for 16, 64 and 256 rows

    1024 x 1024   1.91   1.54   1.23      512 rows: PyTorch (MKL) 1.13
    4096 x 1024   2.17   1.74   1.33                              1.23
    1024 x 4096                           512 rows, XLA 1.09      1.10
     576 x 1536   1.54   1.40   1.12
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.cgutils import get_or_insert_function

from rekindle_kernels.native.cpu import has_feature
from rekindle_kernels.native.kernels.gemm_packing import finisher, narrower
from rekindle_kernels.native.kernels.norms_and_gates import normalise
from rekindle_kernels.native.kernels.operands import row_of
from rekindle_kernels.native.language.dot_products import exchanged
from rekindle_kernels.native.language.handler import first_unit
from rekindle_kernels.native.language.jit import emits, inline, jit
from rekindle_kernels.native.language.memory import WORD, f32, free, malloc, prefetch_at, set_f32
from rekindle_kernels.native.language.vector import LANES, load_f32, store

OUTPUTS = LANES  # of a strip
FEWEST = 96  # of a group: many threads share a strip, and each turns it for itself
PACKED_BYTES = 64 << 10  # of rows that one thread packs: to wake another takes as long


class Instructions(NamedTuple):
    """Instructions of x86 that add the products of columns and a word to sums."""

    spread: str  # brings the word at {4} everywhere into {2}; empty if that is done on the way
    add: tuple[str, ...]  # adds to the sum {0} what the column {1} and {2} or {4} give; {3} may be overwritten


FLOATS = Instructions("vbroadcastss", ("vfmadd231ps {1}, {2}, {0}",))
SPREAD_FLOATS = Instructions("", ("vfmadd231ps {4}{{1to16}}, {1}, {0}",))  # of AVX-512
PAIRS = Instructions("vbroadcastss", ("vpmaddwd {1}, {2}, {3}", "vpaddd {3}, {0}, {0}"))
QUADS = Instructions("vbroadcastss", ("{{vex}} vpdpbusd {1}, {2}, {0}",))


class WidenedForm(NamedTuple):
    """How numbers of a size are multiplied."""

    size: int  # bytes of a number of the matrix
    words: int  # of four bytes that four bytes of the matrix become
    add: Instructions
    unsigned: bool  # rows are larger by 128 than what they stand for
    lanes: int  # of a register
    rows: int  # of a tile
    fewer_rows: int  # of one of the last tiles: so that 8, 16, 32 and 64 rows are divided without a rest
    panel: int  # rows whose words lie next to each other, so that one address reaches them


def form_of(size: int) -> WidenedForm:
    words = 4 // size if size > 1 else 2
    if has_feature("avx512f"):
        add = PAIRS if size == 1 else SPREAD_FLOATS
        return WidenedForm(size, words, add, False, lanes=16, rows=24, fewer_rows=8, panel=8)
    if size == 1 and has_feature("avxvnni"):
        return WidenedForm(1, 1, QUADS, True, lanes=8, rows=6, fewer_rows=4, panel=1)
    add = PAIRS if size == 1 else FLOATS
    return WidenedForm(size, words, add, False, lanes=8, rows=6, fewer_rows=4, panel=1)


def functions(size: int) -> Any:
    """Return `prepare(job, threads) -> blocks`, `pack(job, index)` and `multiply(job, index)`, for `gemm.kernel`."""
    form = form_of(size)
    put_row, turn = row_packer(form), turner(form)
    lanes, most, fewer, panel = form.lanes, form.rows, form.fewer_rows, form.panel
    large, small = multiply_tile(form, most), multiply_tile(form, fewer)
    finish_vector = finisher(size, corrected=form.unsigned)
    per_number = size * form.words  # bytes of a number in a row

    @inline
    def prepare(job: Any, threads: int) -> int:
        rows, row_bytes, strips = job.rows, job.width * per_number, job.results // OUTPUTS
        groups = max(1, min((4 * threads + strips - 1) // strips, rows // FEWEST))
        job.group = (rows + groups * most - 1) // (groups * most) * most
        job.parts = min(strips, (8 * threads + groups - 1) // groups)
        whole = rows + most  # the last tile may be larger than what is left
        job.packed = malloc(whole * row_bytes + (rows + LANES) * 4)
        job.row_scales = job.packed + whole * row_bytes
        job.per_pack = max(1, PACKED_BYTES // (job.width * 4))
        job.packs = (rows + job.per_pack - 1) // job.per_pack
        return job.packs + job.parts * ((rows + job.group - 1) // job.group)

    @jit
    def pack(job: Any, index: int) -> None:
        row_bytes, first = job.width * per_number, index * job.per_pack
        scratch = malloc(row_bytes + job.width * 5)
        for r in range(first, min(job.rows, first + job.per_pack)):
            if panel == 1:
                put_row(job, r, job.packed + r * row_bytes, scratch)
                continue
            row = scratch + job.width * 5
            put_row(job, r, row, scratch)
            out = job.packed + r // panel * panel * row_bytes + r % panel * 4
            for j in range(row_bytes // 4):
                set_f32(out, j * panel, f32(row, j))
        free(scratch)

    @inline
    def turn_strip(job: Any, n: int, strip: int, weight_sums: int) -> None:
        """The weights of the outputs [n, n + OUTPUTS)."""
        stride = job.width * size
        for lane in range(0, OUTPUTS, lanes):
            turn(job.weight + (n + lane) * stride, stride // 4, strip + lane * 4, weight_sums + lane * 4)

    @jit
    def multiply_strip(job: Any, n: int, begin: int, end: int, strip: int) -> None:
        """The rows [begin, end) times a strip, or two of them where results are gated."""
        row_bytes, halves = job.width * per_number, 2 if job.ups > 0 else 1
        behind, strip_bytes = most * OUTPUTS * 4, OUTPUTS * row_bytes
        sums = strip + halves * strip_bytes
        weight_sums = sums + 2 * behind
        for half in range(halves):
            turn_strip(job, n + half * job.ups, strip + half * strip_bytes, weight_sums + half * behind)
        # The next strip's weights are asked for meanwhile, a few bytes with each word.
        words, size_of_strip = row_bytes // 4, OUTPUTS * job.width * size
        tiles = (end - begin + most - 1) // most
        step = (size_of_strip + tiles * words - 1) // (tiles * words)
        ahead = job.weight + (n + OUTPUTS) * job.width * size
        r = begin
        while r < end:
            left = end - r
            small_tiles = (left + fewer - 1) // fewer
            behind_large = (max(0, left - most) + fewer - 1) // fewer
            is_small = left < 2 * most and small_tiles * fewer < most + behind_large * fewer
            count = fewer if is_small else most
            for half in range(halves):
                x, here = job.packed + r * row_bytes, strip + half * strip_bytes
                coming = ahead + half * job.ups * job.width * size
                if is_small:
                    small(here, x, words, sums + half * behind, coming, step)
                else:
                    large(here, x, words, sums + half * behind, coming, step)
            for i in range(min(count, left)):
                finish_vector(job, sums + i * OUTPUTS * 4, weight_sums, behind, r + i, n)
            ahead += step * words
            r += count

    @jit
    def multiply(job: Any, index: int) -> None:
        parts, strips = job.parts, job.results // OUTPUTS
        part, begin = index % parts, index // parts * job.group
        end = min(job.rows, begin + job.group)
        strip = malloc(2 * OUTPUTS * job.width * per_number + 4 * most * OUTPUTS * 4)
        for number in range(first_unit(part, parts, strips), first_unit(part + 1, parts, strips)):
            multiply_strip(job, number * OUTPUTS, begin, end, strip)
        free(strip)

    return prepare, pack, multiply


def row_packer(form: WidenedForm) -> Any:
    """Return `put(job, r, out, scratch)`: row r in words of the form; scratch has five bytes for each column."""
    if form.size > 1:
        return put_floats
    narrow = narrower(1, signed=not form.unsigned)
    if form.unsigned:
        return narrow
    spread_pairs = pair_spreader(form.lanes)

    @inline
    def put_pairs(job: Any, r: int, out: int, scratch: int) -> None:
        narrow(job, r, scratch, scratch + job.width)
        spread_pairs(scratch, job.width // 4, out)

    return put_pairs


@inline
def put_floats(job: Any, r: int, out: int, scratch: int) -> None:
    width, x = job.width, job.x + row_of(job, r) * job.width * 4
    if job.norm > 0:
        normalise(x, job.norm, job.eps, width, out)
        return
    for k in range(0, width, LANES):
        store(out, k, load_f32(x, k))


def ints(lanes: int) -> Any:
    """Return the type of a register of words."""
    return ir.VectorType(ir.IntType(32), lanes)


def transposed(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Return registers of a column each for as many of a row."""
    if len(rows) > 8:
        return exchanged(builder, rows)

    def pick(a: Any, b: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(ints(8), lanes))

    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    pairs = [pick(rows[i], rows[i + 1], lanes) for i in range(0, 8, 2) for lanes in (low, high)]
    first, second = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    fours = [pick(pairs[i], pairs[i + 2], lanes) for i in (0, 1, 4, 5) for lanes in (first, second)]
    left, right = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    return [pick(fours[i], fours[i + 4], lanes) for lanes in (left, right) for i in range(4)]


def add_row(
    builder: Any, instructions: Instructions, word: Any, step: Any, row: int, columns: list[Any], sums: list[Any]
) -> list[Any]:
    """Return `sums` plus the word `row` steps after `word` times each of the columns. A step is a number of bytes, or,
    for up to two, a register.

    As assembly: the compiler would ask for the words of all rows first, and have no registers left for the sums.
    """
    count, kind = len(sums), columns[0].type
    spread, spare = f"${count}", f"${count + 1}"
    steps = [] if isinstance(step, int) else [step]
    behind = ("", f",${2 * count + 3}", f",${2 * count + 3},2")[row] if steps else ""
    place = f"{'' if steps else row * step}(${2 * count + 2}{behind})"
    lines = [f"{instructions.spread} {place}, {spread}"] if instructions.spread else []
    for i in range(count):
        overwritten = spread if i == count - 1 else spare  # the last needs the word no more
        sums_and_columns = f"${i}", f"${count + 2 + i}"
        lines += [each.format(*sums_and_columns, spread, overwritten, place) for each in instructions.add]
    registers = ["=v"] * count + ["=&v"] * 2 + ["v"] * count + ["r"] * (1 + len(steps)) + [str(i) for i in range(count)]
    results = ir.LiteralStructType([kind] * (count + 2))
    function = ir.FunctionType(results, [kind] * count + [WORD] * (1 + len(steps)) + [kind] * count)
    operands = [*columns, word, *steps, *sums]
    added = builder.asm(function, "\n".join(lines), ",".join(registers), operands, side_effect=False)
    return [builder.extract_value(added, i) for i in range(count)]


def bf16_in_two(builder: Any, words: Any) -> tuple[Any, Any]:
    """Return the low and the high bfloat16 of each word, as float32."""
    return builder.shl(words, _all(words, 16)), builder.and_(words, _all(words, 0xFFFF0000))


def bytes_in_two(builder: Any, words: Any) -> tuple[Any, Any]:
    """Return the first and third of four int8 in each word, and the others, as two of 16 bits."""
    shorts = builder.bitcast(words, ir.VectorType(ir.IntType(16), 2 * words.type.count))
    eight = _all(shorts, 8)
    even = builder.ashr(builder.shl(shorts, eight), eight)
    return builder.bitcast(even, words.type), builder.bitcast(builder.ashr(shorts, eight), words.type)


def add_bytes(builder: Any, a: Any, words: Any) -> Any:
    """Return a plus the four int8 in each of eight lanes of `words`, by AVX-VNNI."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    function = get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.256")
    return builder.call(function, [a, _all(words, 0x01010101), words])


def _all(vector: Any, number: int) -> Any:
    return ir.Constant(vector.type, [number] * vector.type.count)


def _register(builder: Any, lanes: int, start: Any, number: Any) -> Any:
    """Return the address of the register that begins at word `number`."""
    return builder.inttoptr(builder.add(start, builder.mul(number, WORD(4))), ints(lanes).as_pointer())


def pair_spreader(lanes: int) -> Any:
    """Return `spread(source, words, target)`: a row of int8 becomes pairs of 16 bits, in the order of `turner`."""

    @emits(types.void, types.int64, types.int64, types.int64)
    def spread(builder: Any, source: Any, words: Any, target: Any) -> None:
        with cgutils.for_range(builder, builder.udiv(words, WORD(lanes))) as loop:
            first = builder.mul(loop.index, WORD(lanes))
            loaded = builder.load(_register(builder, lanes, source, first), align=1)
            for half, value in enumerate(bytes_in_two(builder, loaded)):
                place = builder.add(builder.mul(first, WORD(2)), WORD(half * lanes))
                builder.store(value, _register(builder, lanes, target, place), align=4)

    return spread


def turner(form: WidenedForm) -> Any:
    """Return `turn(w, words, strip, weight_sums)`: transposes as many outputs as a register has lanes, of `words` words
    each, into lanes of a strip. Where rows are unsigned, it also stores the sums of the outputs' weights, to correct
    the results.
    """
    lanes = form.lanes

    @emits(types.void, types.int64, types.int64, types.int64, types.int64)
    def turn(builder: Any, w: Any, words: Any, strip: Any, weight_sums: Any) -> None:
        total = cgutils.alloca_once(builder, ints(lanes))
        builder.store(ir.Constant(ints(lanes), [0] * lanes), total)
        starts = [builder.add(w, builder.mul(words, WORD(4 * row))) for row in range(lanes)]
        with cgutils.for_range(builder, builder.udiv(words, WORD(lanes))) as loop:
            first = builder.mul(loop.index, WORD(lanes))
            rows = [builder.load(_register(builder, lanes, start, first), align=4) for start in starts]
            columns = transposed(builder, rows)
            for j, value in enumerate(placed(builder, columns)):
                word = builder.add(builder.mul(first, WORD(form.words)), WORD(j))
                builder.store(value, _register(builder, lanes, strip, builder.mul(word, WORD(OUTPUTS))), align=4)
            if form.unsigned:
                sums = builder.load(total)
                for column in columns:
                    sums = add_bytes(builder, sums, column)
                builder.store(sums, total)
        builder.store(builder.load(total), _register(builder, lanes, weight_sums, WORD(0)), align=4)

    def placed(builder: Any, columns: list[Any]) -> list[Any]:
        """Return the words that eight of the matrix become, in the order of a row's."""
        if form.size == 4:
            return columns
        if form.size == 2:
            return [half for column in columns for half in bf16_in_two(builder, column)]
        if form.unsigned:
            return columns
        both = [bytes_in_two(builder, column) for column in columns]
        return [halves[0] for halves in both] + [halves[1] for halves in both]

    return turn


def multiply_tile(form: WidenedForm, rows: int, outputs: int = OUTPUTS, *, align: int = 4, asks: bool = True) -> Any:
    """Return `tile(strip, x, words, sums, ahead, step)`: rows of so many words, in panels at x, times a strip [words,
    outputs], which lies at a multiple of `align` bytes; sums [rows, outputs]. With each word it `asks` the cache for
    memory that is `step` bytes further."""
    lanes = form.lanes
    vectors, together = outputs // lanes, max(3, form.panel)  # rows that an address reaches

    @emits(types.void, *[types.int64] * 6)
    def tile(builder: Any, strip: Any, x: Any, words: Any, sums: Any, ahead: Any, step: Any) -> None:
        kind = ir.VectorType(ir.FloatType(), lanes) if form.size > 1 else ints(lanes)

        def register(start: Any, number: Any) -> Any:
            return builder.bitcast(_register(builder, lanes, start, number), kind.as_pointer())

        totals = [cgutils.alloca_once(builder, kind) for _ in range(rows * vectors)]
        for total in totals:
            builder.store(ir.Constant(kind, [0] * lanes), total)
        row_size = builder.mul(words, WORD(4))
        starts = [builder.add(x, builder.mul(row_size, WORD(row))) for row in range(0, rows, together)]
        with cgutils.for_range(builder, words) as loop:
            first = builder.mul(loop.index, WORD(outputs))
            places = [register(strip, builder.add(first, WORD(v * lanes))) for v in range(vectors)]
            columns = [builder.load(place, align=align) for place in places]
            if asks:
                prefetch_at(builder, builder.add(ahead, builder.mul(loop.index, step)))
            for row in range(rows):
                here = totals[row * vectors : (row + 1) * vectors]
                word = builder.add(starts[row // together], builder.mul(loop.index, WORD(4 * form.panel)))
                before = [builder.load(total) for total in here]
                step = row_size if form.panel == 1 else 4
                after = add_row(builder, form.add, word, step, row % together, columns, before)
                for total, value in zip(here, after, strict=True):
                    builder.store(value, total)
        for number, total in enumerate(totals):
            builder.store(builder.load(total), register(sums, WORD(number * lanes)), align=4)

    return tile
