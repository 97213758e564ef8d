"""Attention of prompt chunks over pages: flash attention with tiles that stay in a core's own cache.

Work is divided by (sequence, tile of queries, kv head). The queries of one kv head are the rows of a matrix; a tile of
keys is turned, a tile of values brought in order, once for all of them, and both products run in one micro-kernel of
four rows by four vectors. Tiles that no query sees are skipped.

Products are of float32, or, where pages are bfloat16 and the processor multiplies two of them in a lane, of words that
hold two: queries and weights are rounded to bfloat16 then, sums stay float32. AMX multiplies sixteen rows of them.

Axes: T tokens, H query heads, K kv heads, G = H/K, D head size, S page size, W page-table width, M rows of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rekindle_kernels.native import cpu, kernel_table
from rekindle_kernels.native.cpu import has_feature
from rekindle_kernels.native.kernels.attention_job import (
    FIELDS,
    MASKED,
    NUMBERS,
    PLAIN,
    StoredHeads,
    describer,
    length_of,
)
from rekindle_kernels.native.kernels.prefill_tiles import AMX_ROWS, KEYS, amx_products, loader, products
from rekindle_kernels.native.kernels.rotation import rotator
from rekindle_kernels.native.language import amx
from rekindle_kernels.native.language.dot_products import store_rounded, times_power_of_two
from rekindle_kernels.native.language.handler import Kernel, job_layout
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import f32, free, i32, malloc, set_f32, set_i32
from rekindle_kernels.native.language.records import dim
from rekindle_kernels.native.language.vector import (
    LANES,
    add,
    between,
    larger,
    largest,
    load_f32,
    multiply,
    multiply_add,
    nearest,
    splat,
    store,
    subtract,
    total,
)
from rekindle_kernels.native.language.vector_math import exp, exp_of_one, tanh

ZERO, ONE = np.float32(0), np.float32(1)

JOB = job_layout(
    "prefill",
    {
        **FIELDS,
        "ends": "int32 [prompts + 1]: where each prompt's tokens end",
        "tokens": "of all prompts, padding included",
        "queries": "of a tile",
        "unread": "tiles at the start of the first prompt, which are skipped",
        "decoding": "rows that decode and have tiles like prompts; their tokens, lengths and pages come first",
        "work": "int32 [tiles, 2]: the prompt and the first query of each tile",
        "unit": "rows that are multiplied together",
        "ahead": "keys after its own that a query sees",
    },
    f"{PLAIN} tiles",
    numbers=NUMBERS,
)


class PromptTile(NamedTuple):
    """The queries of one prompt for one kv head. Its rows are G query heads of each query."""

    s: int  # prompt; below 0, a row that decodes: its token, length and pages lie so far before the first prompt's
    k: int  # kv head
    token: int  # of the first query
    position: int  # of the first query
    rows: int
    padded: int  # rows, up to a multiple of those that are multiplied together


class Scratch(NamedTuple):
    """Addresses of what a tile keeps while it passes over the keys; M padded rows."""

    q: int  # [M, D], or half as many words of two bfloat16
    out: int  # [M, D]
    logits: int  # [M, KEYS]
    sums: int  # of weights, [M, LANES]
    keys: int
    values: int
    tops: int  # the largest logits, [M]


@inline
def end_of(job: Any, s: int) -> int:
    """Return where the tokens of the prompt before s end, within the tokens that there are."""
    return max(0, min(i32(job.ends, s), job.tokens))


@inline
def tiles_of(job: Any, s: int) -> int:
    """Return how many tiles a prompt's queries make."""
    return max(0, (end_of(job, s + 1) - end_of(job, s) + job.queries - 1) // job.queries)


@inline
def count_tiles(job: Any, prompts: int) -> int:
    tiles = job.decoding
    for s in range(prompts):
        tiles += tiles_of(job, s)
    return tiles


@inline
def list_tiles(job: Any, prompts: int) -> None:
    """Note where every tile begins."""
    tiles = 0
    for r in range(job.decoding):
        set_i32(job.work, 2 * tiles, r - job.decoding)  # numbers below 0 are rows that decode
        set_i32(job.work, 2 * tiles + 1, 0)
        tiles += 1
    for s in range(prompts):
        for number in range(job.unread if s == 0 else 0, tiles_of(job, s)):
            set_i32(job.work, 2 * tiles, s)
            set_i32(job.work, 2 * tiles + 1, number * job.queries)
            tiles += 1
    job.tiles = tiles


def preparer(stored: StoredHeads, tiled: bool) -> Any:
    """Return `prepare(frame, job, threads)` for heads of that size; `tiled` where the code for AMX is there."""
    D, describe = stored.head_dim, describer(stored)

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        describe(frame, job)
        before, row = frame.settings.decode_rows, job.heads * D * 4
        job.decoding = before if frame.settings.together > 0 else 0
        most = min(dim(frame.ends, 0) - 1, dim(frame.lens, 0) - before)
        prompts = max(0, min(i32(frame.prompts.data, 0), most))
        job.q = job.q + before * row  # the rows that decode come first in all of them
        job.page_table = job.page_table + before * job.width * 4
        job.lens = job.lens + before * 4
        job.out = job.out + before * row
        job.tokens = dim(frame.q, 0) - before
        unread = i32(frame.unread.data, 0) // job.queries if frame.has_unread else 0
        job.unread = max(0, min(unread, tiles_of(job, 0) if prompts > 0 else 0))
        job.unit = 4
        if tiled and frame.settings.amx > 0 and amx.allowed() > 0:
            job.unit = AMX_ROWS
        for at in range(end_of(job, prompts) * job.heads * D, job.tokens * job.heads * D):
            set_f32(job.out, at, ZERO)
        tiles = count_tiles(job, prompts)
        job.work = malloc(2 * tiles * 4)
        list_tiles(job, prompts)
        return job.tiles * job.kv_heads

    return prepare


@inline
def padded(job: Any, rows: int) -> int:
    return (rows + job.unit - 1) // job.unit * job.unit


@inline
def tile_of(job: Any, index: int) -> PromptTile:
    """Return the tile of a block. The last tiles of a prompt see the most keys and go first, so that threads end
    together."""
    K = job.kv_heads
    G = job.heads // K
    number, k = job.tiles - 1 - index // K, index % K
    s, begin = i32(job.work, 2 * number), i32(job.work, 2 * number + 1)
    if s < 0:
        return PromptTile(s, k, s, length_of(job, s) - 1, G, padded(job, G))
    start = end_of(job, s)
    q_len, length = end_of(job, s + 1) - start, length_of(job, s)
    rows = min(job.queries, q_len - begin) * G
    return PromptTile(s, k, start + begin, length - q_len + begin, rows, padded(job, rows))


@inline
def scratch_of(M: int, D: int) -> Scratch:
    """Return memory for M padded rows, at `q`."""
    q = malloc((M * (2 * D + KEYS + LANES + 1) + 2 * KEYS * D) * 4)
    out, logits, sums = q + M * D * 4, q + 2 * M * D * 4, q + M * (2 * D + KEYS) * 4
    keys = sums + M * LANES * 4
    values = keys + KEYS * D * 4
    return Scratch(q, out, logits, sums, keys, values, values + KEYS * D * 4)


@inline
def address_of_row(job: Any, array: int, tile: PromptTile, m: int, D: int) -> int:
    """Return where row m of a tile is in an array [tokens, heads, D]."""
    G = job.heads // job.kv_heads
    return array + ((tile.token + m // G) * job.heads + tile.k * G + m % G) * D * 4


def starter(stored: StoredHeads, paired: bool) -> Any:
    """Return `start(job, tile, scratch)`: the tile's queries, as the keys are, and nothing seen."""
    put = store_rounded if paired else store
    D, packed, rotate = stored.head_dim, stored.packed, rotator(stored.head_dim)

    @jit
    def start(job: Any, tile: PromptTile, scratch: Scratch) -> None:
        for m in range(tile.padded):
            source = address_of_row(job, job.q, tile, m, D)
            if packed and m < tile.rows:
                rotate(source, scratch.out + m * D * 4)
                source = scratch.out + m * D * 4
            for d in range(0, D, LANES):
                put(scratch.q, m * D + d, load_f32(source, d) if m < tile.rows else splat(ZERO))
                store(scratch.out, m * D + d, splat(ZERO))
            store(scratch.sums, m * LANES, splat(ZERO))
            set_f32(scratch.tops, m, MASKED)

    return start


def attender(D: int, paired: bool, tiled: bool) -> Any:
    """Return `attend(job, tile, scratch, m, key)`: the rows from m on, multiplied together, see the tile of keys that
    begins at `key`.
    """
    elements = 2 if paired else 1  # of a word
    words, key_words = D // elements, KEYS // elements  # of a query, of a row of weights
    product, row_vector = products(paired)
    softmax_row = softmax_function(paired)
    by_keys, by_values = amx_products(D) if tiled else (None, None)

    @jit
    def weigh(job: Any, tile: PromptTile, scratch: Scratch, first: int, end: int, key: int) -> None:
        """Turn logits of rows into weights."""
        G, window, length = job.heads // job.kv_heads, job.window, length_of(job, tile.s)
        for i in range(first, end):
            sees = tile.position + min(i, tile.rows - 1) // G
            low = max(0, sees - window + 1 - key) if window > 0 else 0
            high = max(low, min(KEYS, min(sees + 1 + job.ahead, length) - key))
            softmax_row(
                job,
                scratch.logits + i * KEYS * 4,
                low,
                high,
                scratch.tops + i * 4,
                scratch.sums + i * LANES * 4,
                scratch.out + i * D * 4,
                D,
            )

    @jit
    def attend(job: Any, tile: PromptTile, scratch: Scratch, m: int, key: int) -> None:
        logits = scratch.logits + m * KEYS * 4
        if tiled and job.unit > 4:
            by_keys(scratch.q + m * D * 2, scratch.keys, logits)
            weigh(job, tile, scratch, m, min(m + job.unit, tile.rows), key)
            by_values(logits, scratch.values, scratch.out + m * D * 4)
            return
        product(scratch.q + m * words * 4, words, scratch.keys, KEYS, words, logits, KEYS, False)
        weigh(job, tile, scratch, m, m + 4, key)
        if D % KEYS == 0:
            for column in range(0, D, KEYS):
                at = scratch.out + (m * D + column) * 4
                product(logits, KEYS, scratch.values + column * 4, D, key_words, at, D, True)
        else:
            for i in range(m, m + 4):
                for column in range(0, D, LANES):
                    at = scratch.out + (i * D + column) * 4
                    row_vector(scratch.logits + i * KEYS * 4, scratch.values + column * 4, D, key_words, at)

    return attend


def finisher(stored: StoredHeads, paired: bool) -> Any:
    """Return `put_results(job, tile, scratch)`: sums of values, divided by sums of weights, the sink's included."""
    unit = unit_of(paired)
    D, packed, rotate = stored.head_dim, stored.packed, rotator(stored.head_dim)

    @jit
    def put_results(job: Any, tile: PromptTile, scratch: Scratch) -> None:
        G = job.heads // job.kv_heads
        for m in range(tile.rows):
            target = address_of_row(job, job.out, tile, m, D)
            top, weights = f32(scratch.tops, m), total(load_f32(scratch.sums, m * LANES))
            keep = ONE
            if job.sinks != 0:
                sink = f32(job.sinks, tile.k * G + m % G) * unit
                if sink > top:
                    keep = exp_of_one((top - sink) / unit)
                    weights = weights * keep + ONE
                else:
                    weights += exp_of_one((sink - top) / unit)
            factor = keep / weights if weights > ZERO else ZERO  # 0 where a row that decodes has no sequence
            for d in range(D):
                set_f32(target, d, f32(scratch.out, m * D + d) * factor)
            if packed:
                rotate(target, target)

    return put_results


def kernel(stored: StoredHeads, paired: bool) -> Kernel:
    """Attention of prompts over their pages. `paired`: pages are bfloat16, and multiplied two by two."""
    D = stored.head_dim
    # Whether the code is there; a caller says whether it runs.
    tiled = paired and (cpu.building_for is not None or has_feature("amx-bf16"))
    prepare, load, start = preparer(stored, tiled), loader(stored, paired), starter(stored, paired)
    attend, put_results = attender(D, paired, tiled), finisher(stored, paired)

    @jit
    def block(job: Any, index: int) -> None:
        tile = tile_of(job, index)
        G, window = job.heads // job.kv_heads, job.window
        scratch = scratch_of(tile.padded, D)
        start(job, tile, scratch)
        last = min(length_of(job, tile.s), tile.position + tile.rows // G + job.ahead)
        first = max(0, tile.position - window + 1) if window > 0 else 0
        shapes, unit = 0, job.unit
        if tiled and unit > 4:
            shapes = malloc(amx.MEMORY)
            amx.begin(shapes, amx.DEPTH)
        for key in range(first // KEYS * KEYS, last, KEYS):
            load(job, tile.s, tile.k, key, first, last, scratch.keys, scratch.values)
            for number in range(tile.padded // unit):
                m = number * unit
                if key > tile.position + min(tile.rows - 1, m + unit - 1) // G + job.ahead:
                    continue  # none of them sees it
                attend(job, tile, scratch, m, key)
        if tiled and unit > 4:
            amx.end(shapes)
            free(shapes)
        put_results(job, tile, scratch)
        free(scratch.q)

    @jit
    def finish(job: Any) -> None:
        free(job.work)

    table = kernel_table.PREFILL_PACKED if stored.packed else kernel_table.PREFILL
    return Kernel(table, JOB, prepare, block, finish)


LAST = KEYS - LANES
EIGHT = np.float32(8)
LN_2, LOG2_E = np.float32(0.6931471805599453), np.float32(1.4426950408889634)
# 2^x on ±1/2, highest power first: ln(2)^n / n!
E4, E3, E2 = np.float32(9.6181291e-3), np.float32(5.5504109e-2), np.float32(2.4022651e-1)


@inline
def power(x: Any) -> Any:
    """2 to the power of a vector, to one part in 20,000: enough for weights that are rounded to eight bits."""
    steps = nearest(x)
    rest = subtract(x, steps)
    curve = multiply_add(splat(E4), rest, splat(E3))
    curve = multiply_add(curve, rest, splat(E2))
    curve = multiply_add(curve, rest, splat(LN_2))
    return times_power_of_two(multiply_add(curve, rest, splat(ONE)), steps)


def unit_of(paired: bool) -> np.float32:
    """Return the factor of logits: they are kept in the unit of their exponential, 2^x where pages are paired."""
    return LOG2_E if paired else ONE


def softmax_function(paired: bool) -> Any:
    """Return `softmax_row(job, logits, low, high, top_at, sums, out, width)`; a row of `out` has `width` numbers."""
    put, exponential, unit = (store_rounded if paired else store), (power if paired else exp), unit_of(paired)
    # How far logits may rise above what weights are relative to, before what was summed is rescaled: that costs more
    # than the rest of a row, and a weight of 2^8 has as many bits as one of 1.
    slack = EIGHT if paired else ZERO

    @inline
    def softmax_row(job: Any, logits: int, low: int, high: int, top_at: int, sums: int, out: int, width: int) -> None:
        """Turn one row's logits into weights, if it sees the keys [low, high) of the tile; rescale what was summed."""
        scale, cap, before = job.scale, job.soft_cap, f32(top_at, 0)
        a, b, c, d = load_f32(logits, 0), load_f32(logits, LANES), load_f32(logits, 2 * LANES), load_f32(logits, LAST)
        if cap > ZERO:
            factor, height = splat(scale / cap), splat(cap * unit)
            a, b = multiply(tanh(multiply(a, factor)), height), multiply(tanh(multiply(b, factor)), height)
            c, d = multiply(tanh(multiply(c, factor)), height), multiply(tanh(multiply(d, factor)), height)
        else:
            factor = splat(scale * unit)
            a, b, c, d = multiply(a, factor), multiply(b, factor), multiply(c, factor), multiply(d, factor)
        if low > 0 or high < KEYS:
            a, b = between(a, low, high, MASKED), between(b, low - LANES, high - LANES, MASKED)
            c, d = between(c, low - 2 * LANES, high - 2 * LANES, MASKED), between(d, low - LAST, high - LAST, MASKED)
        highest = largest(larger(larger(a, b), larger(c, d)))
        top = highest if highest > before + slack else before
        a, b = exponential(subtract(a, splat(top))), exponential(subtract(b, splat(top)))
        c, d = exponential(subtract(c, splat(top))), exponential(subtract(d, splat(top)))
        if low > 0 or high < KEYS:  # exactly 0, so that it makes no difference which other keys are in the tile
            a, b = between(a, low, high, ZERO), between(b, low - LANES, high - LANES, ZERO)
            c, d = between(c, low - 2 * LANES, high - 2 * LANES, ZERO), between(d, low - LAST, high - LAST, ZERO)
        put(logits, 0, a)
        put(logits, LANES, b)
        put(logits, 2 * LANES, c)
        put(logits, LAST, d)
        keep = ONE
        if top > before:
            keep = exp_of_one((before - top) / unit)
            for column in range(0, width, LANES):
                store(out, column, multiply(load_f32(out, column), splat(keep)))
        set_f32(top_at, 0, top)
        store(sums, 0, multiply_add(load_f32(sums, 0), splat(keep), add(add(a, b), add(c, d))))

    return softmax_row
