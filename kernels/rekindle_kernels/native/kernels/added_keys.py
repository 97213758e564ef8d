"""Attention in both directions over blocks of keys: flash attention with tiles that fit a core's own cache.

Work is divided by (head, tile of queries). Scores stand upright: a lane has a query, and a row a key, as AMX and
vectors leave them when a tile of keys, as it is stored, multiplies turned queries. So a softmax has no sums across
lanes, and its weights are already laid out to be multiplied by turned values. Queries come in units of 64; tiles of
keys that none of a unit sees are skipped.

Products are those of `prefill_tiles`: of float32; where heads are bfloat16 and the processor multiplies two of them in
a lane, of words that hold two, or, with AMX, of sixteen keys at a time. Weights are rounded to bfloat16 then, and sums
stay float32. Heads of bfloat16 are widened elsewhere.

A head size is an argument: rows in scratch are filled up to whole vectors with zeros, which change no sum.

Milliseconds of processor time for as many queries as keys, 16 heads of 64, one core of a busy Xeon with AMX, medians in
turn (`workshop/bench/encoder_parts.py`). PyTorch computes attention to all keys at once:

                         bfloat16                 float32
    queries        here    XLA  PyTorch     here    XLA  PyTorch
    16             0.1     0.2      0.1     0.1     0.2      0.1
    64             0.2     0.4      0.2     0.3     0.6      0.3
    512            2.7     9.2      4.1     8.8    14.4     11.1
    1024           9.8    49.3     15.5    34.4    59.0     43.1

Axes: H heads, M queries, N keys, D head size, W words of a row in scratch, P its numbers in whole vectors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from rekindle_kernels.native import cpu, kernel_table
from rekindle_kernels.native.cpu import has_feature
from rekindle_kernels.native.kernels.prefill_tiles import products
from rekindle_kernels.native.language import amx
from rekindle_kernels.native.language.dot_products import (
    join_rounded,
    load_interleaved,
    power_of_floats,
    rough_power,
    transpose,
)
from rekindle_kernels.native.language.handler import Kernel, job_layout, nothing
from rekindle_kernels.native.language.jit import emits, inline, jit
from rekindle_kernels.native.language.memory import LINE, WORD, bf16, f32, free, i32, malloc, set_f32, set_i32
from rekindle_kernels.native.language.records import dim, take
from rekindle_kernels.native.language.vector import (
    LANES,
    add,
    larger,
    largest,
    load_bf16,
    load_distances,
    load_f32,
    multiply,
    multiply_add,
    splat,
    store,
    subtract,
    where_negative,
)
from rekindle_kernels.native.language.vector_math import LOG2_E, exp

STRIPS = 4  # vectors of queries that are multiplied together
UNIT = STRIPS * LANES  # queries
KEYS = 128  # of a tile, at most
STEP = 2 * LANES  # keys of a tile are a multiple
UNITS = 8  # of a block of work, at most: with a tile of keys they stay in the second cache
BLOCKS = 4  # of work for each thread, so that they end together
ROWS = 4  # that vectors multiply together
BOUNDS = 4  # of a unit: the smallest and the largest start, and stop
MASKED = np.float32(-2e30)  # the score of a masked key, below the first value of the running maximum
ZERO, ONE, MINUS_ONE = np.float32(0), np.float32(1), np.float32(-1)

JOB = job_layout(
    "addkeys",
    {
        "most": "[heads, queries]",
        "total": "[heads, queries]",
        "weighed": "[heads, queries, head_dim]",
        "q": "[heads, queries, head_dim]",
        "k": "[heads, keys, head_dim]",
        "v": "[heads, keys, head_dim]",
        "starts": "int32 [queries]",
        "stops": "int32 [queries]",
        "most_now": "[heads, queries]",
        "total_now": "[heads, queries]",
        "weighed_now": "[heads, queries, head_dim]",
        "words": "of a row in scratch: whole vectors",
        "depth": "words of a row that are multiplied",
        "padded": "numbers of a row of sums: whole vectors",
        "tiles": "of the queries of a head",
        "units": "of a tile",
        "tiled": "1 where products are those of AMX",
    },
    "queries keys head_dim",
    numbers={"scale": "of scores"},
)


class KeysForm(NamedTuple):
    """How the heads are multiplied that a kernel is compiled for."""

    size: int  # bytes of a number in memory
    paired: bool  # a word holds two numbers
    tiled: bool  # the code for AMX is there; a caller says whether it runs

    @classmethod
    def of(cls, dtype: str) -> KeysForm:
        """Return the form for the processor that is compiled for."""
        paired = dtype == "bfloat16" and has_feature("avx512bf16")
        tiled = paired and (cpu.building_for is not None or has_feature("amx-bf16"))
        return cls(2 if dtype == "bfloat16" else 4, paired, tiled)

    @property
    def each(self) -> int:
        """Numbers of a word."""
        return 2 if self.paired else 1


class TileScratch(NamedTuple):
    """Addresses of what a tile of queries keeps while it passes over the keys; U units."""

    q: int  # [U, W, UNIT] words
    out: int  # [U, P, UNIT]
    tops: int  # the scores that weights are relative to, [U, UNIT]
    totals: int  # [U, UNIT]
    seen: int  # int32 [U, 2, UNIT]: where queries begin and end to see keys
    bounds: int  # int32 [U, BOUNDS]
    keys: int  # [KEYS, W] words
    values: int  # turned, [P, KEYS] or half as many words
    scores: int  # [KEYS, UNIT], then weights
    rows: int  # [KEYS, W] words, then [LANES, P]: what is turned next
    shapes: int  # of AMX's registers


@inline
def scratch_of(units: int, W: int, P: int) -> TileScratch:
    """Return memory for a tile, at `q`."""
    lanes = units * UNIT * 4
    q = malloc(lanes * (W + P + 4) + units * LINE + (2 * KEYS * W + (KEYS + LANES) * P + KEYS * UNIT) * 4 + amx.MEMORY)
    out = q + lanes * W
    tops = out + lanes * P
    totals, seen = tops + lanes, tops + 2 * lanes
    bounds = seen + 2 * lanes
    keys = bounds + units * LINE
    values = keys + KEYS * W * 4
    rows = values + KEYS * P * 4
    scores = rows + (KEYS * W + LANES * P) * 4
    return TileScratch(q, out, tops, totals, seen, bounds, keys, values, scores, rows, scores + KEYS * UNIT * 4)


@inline
def clear(out: int, count: int) -> None:
    for at in range(0, count, LANES):
        store(out, at, splat(ZERO))


@inline
def copy_floats(source: int, D: int, out: int, W: int) -> None:
    """Copy D float32, and zeros up to W words."""
    whole = D // LANES * LANES
    for d in range(0, whole, LANES):
        store(out, d, load_f32(source, d))
    clear(out + whole * 4, W - whole)
    for d in range(whole, D):
        set_f32(out, d, f32(source, d))


@inline
def copy_widened(source: int, D: int, out: int, W: int) -> None:
    """Copy D bfloat16 as float32."""
    whole = D // LANES * LANES
    for d in range(0, whole, LANES):
        store(out, d, load_bf16(source, d))
    clear(out + whole * 4, W - whole)
    for d in range(whole, D):
        set_f32(out, d, bf16(source, d))


@inline
def copy_pairs(source: int, D: int, out: int, W: int) -> None:
    """Copy D bfloat16 as words of two."""
    copy_floats(source, D // 2, out, W)
    if D % 2 > 0:
        set_f32(out, D // 2, bf16(source, D - 1))
        set_i32(out, D // 2, (i32(out, D // 2) >> 16) & 0xFFFF)


@inline
def turn(rows: int, width: int, out: int, height: int, count: int) -> None:
    """Turn sixteen rows of `count` words, `width` words apart, into columns of rows `height` words apart."""
    for at in range(0, count, LANES):
        transpose(rows + at * 4, width, out + at * height * 4, height)


def beginner(form: KeysForm, copy_row: Any) -> Any:
    """Return `begin(job, head, first, count, scratch)`, which brings queries and their sums so far into scratch."""
    size = form.size

    @jit
    def note_seen(job: Any, first: int, count: int, seen: int, bounds: int) -> None:
        """Note the keys of a unit's queries; padding sees the last query's keys."""
        N = job.keys
        set_i32(bounds, 0, N)
        set_i32(bounds, 1, 0)
        set_i32(bounds, 2, N)
        set_i32(bounds, 3, 0)
        for lane in range(UNIT):
            m = first + min(lane, count - 1)
            stop = max(0, min(N, i32(job.stops, m)))
            start = max(0, min(stop, i32(job.starts, m)))
            set_i32(seen, lane, start)
            set_i32(seen, UNIT + lane, stop)
            set_i32(bounds, 0, min(i32(bounds, 0), start if start < stop else N))
            set_i32(bounds, 1, max(i32(bounds, 1), start))
            set_i32(bounds, 2, min(i32(bounds, 2), stop))
            set_i32(bounds, 3, max(i32(bounds, 3), stop if start < stop else 0))

    @jit
    def begin(job: Any, head: int, first: int, count: int, scratch: TileScratch) -> None:
        D, W, P = job.head_dim, job.words, job.padded
        for m in range(0, count, LANES):
            u, lane = m // UNIT, m % UNIT
            q, out = scratch.q + (u * W * UNIT + lane) * 4, scratch.out + (u * P * UNIT + lane) * 4
            for i in range(LANES):
                row = scratch.rows + i * W * 4
                if m + i < count:
                    copy_row(job.q + (head * job.queries + first + m + i) * D * size, D, row, W)
                else:
                    clear(row, W)
            turn(scratch.rows, W, q, UNIT, W)
            for i in range(LANES):
                row, at = scratch.rows + i * P * 4, head * job.queries + first + m + i
                if m + i < count:
                    copy_floats(job.weighed + at * D * 4, D, row, P)
                    set_f32(scratch.totals, m + i, f32(job.total, at))
                    set_f32(scratch.tops, m + i, f32(job.most, at))
                else:
                    clear(row, P)
                    set_f32(scratch.totals, m + i, ZERO)
                    set_f32(scratch.tops, m + i, ZERO)
            turn(scratch.rows, P, out, UNIT, P)
        for u in range((count + UNIT - 1) // UNIT):
            past = (count + LANES - 1) // LANES * LANES  # the first lane without a row
            for m in range(max(u * UNIT, past), (u + 1) * UNIT, LANES):
                store(scratch.totals, m, splat(ZERO))
                store(scratch.tops, m, splat(ZERO))
                for w in range(W):
                    store(scratch.q, (u * W + w) * UNIT + m % UNIT, splat(ZERO))
                for d in range(P):
                    store(scratch.out, (u * P + d) * UNIT + m % UNIT, splat(ZERO))
            note_seen(
                job, first + u * UNIT, min(UNIT, count - u * UNIT), scratch.seen + u * 2 * UNIT * 4,
                scratch.bounds + u * LINE,
            )  # fmt: skip

    return begin


@jit
def end(job: Any, head: int, first: int, count: int, scratch: TileScratch) -> None:
    """Write the sums."""
    D, P = job.head_dim, job.padded
    whole = D // LANES * LANES
    for m in range(0, count, LANES):
        out = scratch.out + (m // UNIT * P * UNIT + m % UNIT) * 4
        for d in range(0, P, LANES):
            transpose(out + d * UNIT * 4, UNIT, scratch.rows + d * 4, P)
        for i in range(min(LANES, count - m)):
            row, at = scratch.rows + i * P * 4, head * job.queries + first + m + i
            set_f32(job.most_now, at, f32(scratch.tops, m + i))
            set_f32(job.total_now, at, f32(scratch.totals, m + i))
            for d in range(0, whole, LANES):
                store(job.weighed_now, at * D + d, load_f32(row, d))
            for d in range(whole, D):
                set_f32(job.weighed_now, at * D + d, f32(row, d))


def loader(form: KeysForm, copy_row: Any) -> Any:
    """Return `load(job, head, first, count, scratch)`: a tile of keys, as rows, and of turned values."""
    size, paired = form.size, form.paired

    @jit
    def load(job: Any, head: int, first: int, count: int, scratch: TileScratch) -> None:
        """Bring so many keys and values into scratch; those after the last are zeros."""
        D, W, P, N = job.head_dim, job.words, job.padded, job.keys
        for j in range(count):
            at = (head * N + first + j) * D * size
            if first + j < N:
                copy_row(job.k + at, D, scratch.keys + j * W * 4, W)
                copy_row(job.v + at, D, scratch.rows + j * W * 4, W)
            else:
                clear(scratch.keys + j * W * 4, W)
                clear(scratch.rows + j * W * 4, W)
        if paired:
            pairs = scratch.rows + KEYS * W * 4  # words of two values
            for j in range(0, count, STEP):
                for i in range(LANES):
                    one = scratch.rows + (j + 2 * i) * W * 4
                    for d in range(0, P, LANES):
                        store(pairs, i * P + d, load_interleaved(one, one + W * 4, d))
                turn(pairs, P, scratch.values + j // 2 * 4, KEYS // 2, P)
        else:
            for j in range(0, count, LANES):
                turn(scratch.rows + j * W * 4, W, scratch.values + j * 4, KEYS, P)

    return load


def tile_products() -> tuple[Any, Any]:
    """Return `score(keys, row, count, q, depth, scores)` and `weigh(values, weights, count, P, out)` by AMX: the
    scores of `count` keys for four strips of queries, and their values times weights, added to `out`.

    `row` is the bytes from a row of keys to the next.
    """
    line, row_of_values = WORD(UNIT * 4), WORD(KEYS // 2 * 4)

    def step(builder: Any, rows: Any, row: Any, columns: Any) -> None:
        amx.load_tile(builder, STRIPS, rows, row)
        for strip in range(STRIPS):
            register = STRIPS + 1 + strip % 2
            amx.load_tile(builder, register, builder.add(columns, WORD(strip * LINE)), line)
            amx.add_products_of_pairs(builder, strip, STRIPS, register)

    @emits(types.void, types.int64)
    def begin(builder: Any, sums: Any) -> None:
        for strip in range(STRIPS):
            amx.zero_tile(builder, strip)

    @emits(types.void, types.int64)
    def leave(builder: Any, sums: Any) -> None:
        for strip in range(STRIPS):
            amx.store_tile(builder, strip, builder.add(sums, WORD(strip * LINE)), line)

    @emits(types.void, types.int64)
    def resume(builder: Any, sums: Any) -> None:
        for strip in range(STRIPS):
            amx.load_tile(builder, strip, builder.add(sums, WORD(strip * LINE)), line)

    @emits(types.void, *[types.int64] * 3)
    def add_keys(builder: Any, keys: Any, row: Any, q: Any) -> None:
        step(builder, keys, row, q)

    @emits(types.void, *[types.int64] * 2)
    def add_values(builder: Any, values: Any, weights: Any) -> None:
        step(builder, values, row_of_values, weights)

    @jit
    def score(keys: int, row: int, count: int, q: int, depth: int, scores: int) -> None:
        for j in range(0, count, LANES):
            begin(scores)
            for w in range(0, depth, LANES):
                add_keys(keys + j * row + w * 4, row, q + w * UNIT * 4)
            leave(scores + j * UNIT * 4)

    @jit
    def weigh(values: int, weights: int, count: int, P: int, out: int) -> None:
        for d in range(0, P, LANES):
            resume(out + d * UNIT * 4)
            for j in range(0, count // 2, LANES):
                add_values(values + (d * KEYS // 2 + j) * 4, weights + j * UNIT * 4)
            leave(out + d * UNIT * 4)

    return score, weigh


class Strip(NamedTuple):
    """Addresses of what a vector of queries has; rows of scores and sums are UNIT words apart."""

    scores: int  # [KEYS]: of a tile, then weights
    out: int  # [P]
    tops: int
    totals: int
    starts: int
    stops: int


def softmax(paired: bool, exponential: Any) -> Any:
    """Return `weights_of(strip, factor, key, count, all_seen, P)`, which makes weights of the scores of `count` keys.

    Earlier sums are rescaled where a score is the highest so far; `key` is the number of the first key.
    """

    @inline
    def place(value: Any, j: int, low: Any, high: Any, otherwise: float) -> Any:
        """Return the score or weight of a row, or another number where a lane does not see it."""
        row = splat(np.float32(j))
        inside = where_negative(subtract(row, high), value, splat(otherwise))
        return where_negative(subtract(row, low), splat(otherwise), inside)

    @inline
    def put(scores: int, j: int, a: Any, b: Any) -> None:
        """Write the weights of the rows j and j + 1: as one row of words, or over the scores."""
        if paired:
            store(scores, j // 2 * UNIT, join_rounded(a, b))
        else:
            store(scores, j * UNIT, a)
            store(scores, (j + 1) * UNIT, b)

    @jit
    def rescale(strip: Strip, highest: Any, P: int) -> None:
        """Make weights relative to the highest scores, where these are higher than before."""
        before = load_f32(strip.tops, 0)
        top = where_negative(subtract(before, highest), highest, before)
        keep = exponential(subtract(before, top))
        store(strip.tops, 0, top)
        store(strip.totals, 0, multiply(load_f32(strip.totals, 0), keep))
        for d in range(P):
            store(strip.out, d * UNIT, multiply(load_f32(strip.out, d * UNIT), keep))

    @jit
    def weights_of(strip: Strip, factor: float, key: int, count: int, all_seen: bool, P: int) -> None:
        scores, times = strip.scores, splat(factor)
        low, high = load_distances(strip.starts, 0, key), load_distances(strip.stops, 0, key)
        even, odd = splat(MASKED), splat(MASKED)
        if all_seen:
            for j in range(0, count, 2):
                even = larger(even, load_f32(scores, j * UNIT))
                odd = larger(odd, load_f32(scores, (j + 1) * UNIT))
            even = multiply(larger(even, odd), times)
        else:
            for j in range(count):
                even = larger(even, place(multiply(load_f32(scores, j * UNIT), times), j, low, high, MASKED))
        if largest(subtract(even, load_f32(strip.tops, 0))) > ZERO:
            rescale(strip, even, P)
        less, sums = multiply(load_f32(strip.tops, 0), splat(MINUS_ONE)), load_f32(strip.totals, 0)
        if all_seen:
            for j in range(0, count, 2):
                a = exponential(multiply_add(load_f32(scores, j * UNIT), times, less))
                b = exponential(multiply_add(load_f32(scores, (j + 1) * UNIT), times, less))
                sums = add(sums, add(a, b))
                put(scores, j, a, b)
        else:
            for j in range(0, count, 2):
                a = exponential(multiply_add(load_f32(scores, j * UNIT), times, less))
                b = exponential(multiply_add(load_f32(scores, (j + 1) * UNIT), times, less))
                a, b = place(a, j, low, high, ZERO), place(b, j + 1, low, high, ZERO)
                sums = add(sums, add(a, b))
                put(scores, j, a, b)
        store(strip.totals, 0, sums)

    return weights_of


def kernel(dtype: str) -> Kernel:
    """Return the kernel that adds a block of keys to sums, for heads of a dtype."""
    form = KeysForm.of(dtype)
    each, tiled = form.each, form.tiled
    powers = has_feature("avx512dq")
    exponential, unit = (rough_power if form.paired else power_of_floats, LOG2_E) if powers else (exp, ONE)
    copy_row = copy_pairs if form.paired else copy_floats if dtype == "float32" else copy_widened
    product, _ = products(paired=form.paired)
    score_tiles, weigh_tiles = tile_products() if tiled else (None, None)
    begin, load = beginner(form, copy_row), loader(form, copy_row)
    weights_of = softmax(form.paired, exponential)

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        take(frame, job)
        heads = dim(frame.q, 0)
        job.queries = dim(frame.q, 1)
        job.keys = dim(frame.k, 1)
        job.head_dim = dim(frame.q, 2)
        job.depth = (job.head_dim + each - 1) // each
        job.words = (job.depth + LANES - 1) // LANES * LANES
        job.padded = (job.head_dim + LANES - 1) // LANES * LANES
        job.tiled = 0
        if tiled and frame.settings.amx > 0:
            job.tiled = amx.allowed()
        units = (job.queries + UNIT - 1) // UNIT
        tiles = max((units + UNITS - 1) // UNITS, min(units, (BLOCKS * threads + heads - 1) // max(1, heads)))
        job.units = (units + tiles - 1) // max(1, tiles)
        job.tiles = (units + job.units - 1) // max(1, job.units)
        return heads * job.tiles

    @jit
    def attend(job: Any, u: int, key: int, count: int, scratch: TileScratch) -> None:
        """Add a tile of `count` keys to the sums of a unit."""
        W, P, scores = job.words, job.padded, scratch.scores
        q, out = scratch.q + u * W * UNIT * 4, scratch.out + u * P * UNIT * 4
        by_tiles = tiled and job.tiled > 0
        if by_tiles:
            score_tiles(scratch.keys, W * 4, count, q, W, scores)
        else:
            for j in range(0, count, ROWS):
                at = scratch.keys + j * W * 4
                product(at, W, q, UNIT, job.depth, scores + j * UNIT * 4, UNIT, False)
        bounds = scratch.bounds + u * LINE
        all_seen = i32(bounds, 1) <= key and i32(bounds, 2) >= key + count
        for lane in range(0, UNIT * 4, LINE):
            at, seen = u * UNIT * 4 + lane, scratch.seen + u * 2 * UNIT * 4 + lane
            strip = Strip(scores + lane, out + lane, scratch.tops + at, scratch.totals + at, seen, seen + UNIT * 4)
            weights_of(strip, job.scale * unit, key, count, all_seen, P)
        if by_tiles:
            weigh_tiles(scratch.values, scores, count, P, out)
        else:
            width, depth = KEYS // each, count // each
            for d in range(0, job.head_dim, ROWS):
                product(scratch.values + d * width * 4, width, scores, UNIT, depth, out + d * UNIT * 4, UNIT, True)

    @jit
    def block(job: Any, index: int) -> None:
        head, first = index // job.tiles, index % job.tiles * job.units * UNIT
        count = min(job.units * UNIT, job.queries - first)
        units = (count + UNIT - 1) // UNIT
        scratch = scratch_of(units, job.words, job.padded)
        begin(job, head, first, count, scratch)
        start, stop = job.keys, 0  # of the keys that any of them sees
        for u in range(units):
            start = min(start, i32(scratch.bounds, u * LINE // 4))
            stop = max(stop, i32(scratch.bounds, u * LINE // 4 + 3))
        if tiled and job.tiled > 0:
            amx.begin(scratch.shapes, amx.DEPTH)
        for key in range(start // KEYS * KEYS, stop, KEYS):
            keys = (min(KEYS, stop - key) + STEP - 1) // STEP * STEP
            load(job, head, key, keys, scratch)
            for u in range(units):
                bounds = scratch.bounds + u * LINE
                if i32(bounds, 0) < key + KEYS and i32(bounds, 3) > key:
                    attend(job, u, key, keys, scratch)
        if tiled and job.tiled > 0:
            amx.end(scratch.shapes)
        end(job, head, first, count, scratch)
        free(scratch.q)

    return Kernel(kernel_table.ADD_KEYS.variant(dtype).spec, JOB, prepare, block, nothing)
