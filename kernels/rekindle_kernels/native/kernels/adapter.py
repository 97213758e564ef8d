"""Products of adapters: each token's row times the rows of rank of its own adapter, and those times their outputs.

XLA would multiply all tokens with all adapters, or make a loop of products, and end a run of native calls.

Threads take tiles of tokens with one adapter. Four tokens are multiplied together, for all modules that have the same
x, with the last one several times where there are fewer: reading the weights takes longer than that, and a token's
numbers are added in the same order whatever other tokens there are.

Where a gate follows, y is read once for both, and tokens without an adapter are gated, too.

Where the processor multiplies pairs of bfloat16, x is rounded for matrices of bfloat16, as it is for those of the base,
and so are its products with the rows of rank.

In a step of few tokens the weights come from memory. They are asked for before: the next rows of `down` while these
are multiplied, and those of `up` some strips ahead, since a strip is a few lines of each row, which no processor's own
prefetcher follows. 30 layers of 135M, 16 tokens over 8 adapters of rank 16, 78 MB: 3.5 ms instead of 7.6 on two cores
of a busy Zen 4; 512 tokens over two of them, pair by pair, 23 instead of 36.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.kernels.norms_and_gates import normalise
from rekindle_kernels.native.language.dot_products import (
    add_pairs,
    load_interleaved,
    load_two_interleaved,
    store_rounded,
)
from rekindle_kernels.native.language.handler import Kernel, first_unit, job_layout
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import LINE, f32, free, i32, malloc, prefetcher, set_word, word
from rekindle_kernels.native.language.records import dim, take
from rekindle_kernels.native.language.vector import (
    LANES,
    Storage,
    add,
    fold_1,
    fold_2,
    fold_4,
    fold_8,
    load_f32,
    multiply,
    multiply_add,
    splat,
    store,
)
from rekindle_kernels.native.language.vector_math import silu
from rekindle_kernels.native.layout import WORD

TILE = 16  # tokens at most
TOGETHER = 4  # tokens, and rows of rank
PAIR = 2  # tokens
ROWS_OF_PAIR = 8  # rows of rank
HALF = 2 * LANES  # outputs of half a strip; where results are gated, one half are gates and the other their ups
STRIP = 2 * HALF  # outputs that are summed in registers
GATED_PARTS = 2  # of a tile's results, where there are fewer tiles than threads
ZERO = np.float32(0)
AHEAD = 2  # strips of weights that are asked for
fetch, fetch_weights = prefetcher(1), prefetcher()  # y into the first cache

JOB = job_layout(
    "adapter",
    {
        "y": "[tokens, outputs]",
        "out": "[tokens, results]",
        "x": "[tokens, inputs]",
        "norm": "[inputs], or 0",
        "down": "[modules · rows, inputs]",
        "up": "[rows, outputs]",
        "owners": "[units]: the adapter of each",
        "order": "the tokens, those of an adapter together",
        "slots": "the adapter of each token in that order",
        "spans": "[modules]: where the outputs of each end",
        "tiles": "[2] of each tile: where it begins and ends in the order",
        "parts": "blocks of a tile: its modules, or parts of the gated results",
        "rows": "of rank",
        "units": "that share these rows",
        "pairs": "of a token's x, which are multiplied pair by pair, or 0",
        "results": "of a token: as many as outputs, or half as many",
    },
    "modules inputs outputs",
    numbers={"eps": "of the norm"},
)


@inline
def is_token(order: int, index: int, tokens: int) -> bool:
    """True if an entry of the sorted order is not padding."""
    token = i32(order, index)
    return token >= 0 and token < tokens


@inline
def owns(owners: int, units: int, slot: int) -> bool:
    """True if a unit is that adapter's."""
    has = False
    for unit in range(units):
        has = has or (slot > 0 and i32(owners, unit) == slot)
    return has


@inline
def list_rows(owners: int, units: int, each: int, slot: int, rows: int) -> int:
    """List the rows of rank that are an adapter's, and return how many there are."""
    count = 0
    for unit in range(units):
        if slot > 0 and i32(owners, unit) == slot:
            for row in range(unit * each, (unit + 1) * each):
                set_word(rows, count, row)
                count += 1
    return count


@inline
def add_to(y: int, at: int, delta: Any) -> None:
    """Add a vector to the outputs from `at` on."""
    store(y, at, add(load_f32(y, at), delta))


@inline
def put_gated(y: int, out: int, gate: int, up: int, gates: Any, ups: Any) -> None:
    """Add to a vector of gates and to their ups, and store the gated result."""
    store(out, gate, multiply(silu(add(load_f32(y, gate), gates)), add(load_f32(y, up), ups)))


@inline
def add_product(x: Any, w: Any, total: Any) -> Any:
    """Multiply two vectors of numbers."""
    return multiply_add(x, w, total)


@inline
def add_pair(x: Any, w: Any, total: Any) -> Any:
    """Multiply two vectors of pairs."""
    return add_pairs(total, x, w)


@inline
def ask_for_four(line: int, step: int) -> None:
    """Ask for a line of each of four rows of rank."""
    fetch_weights(line)
    fetch_weights(line + step)
    fetch_weights(line + 2 * step)
    fetch_weights(line + 3 * step)


def narrower(load: Any, size: int, add_to_total: Any, put: Any) -> Any:
    """Return `narrowed(x0, x1, x2, x3, weights, width, step, narrow, later)`: four tokens times four rows of rank.

    The rows lie `step` bytes apart and have `width` elements each; `load` takes an index of elements of `size` bytes.
    Results are `put` as narrow [pair of rows, token, row]. If `later` is not 0, four rows there are prefetched
    meanwhile.
    """

    @jit
    def narrowed(
        x0: int, x1: int, x2: int, x3: int, weights: int, width: int, step: int, narrow: int, later: int
    ) -> None:
        w1, w2, w3 = weights + step, weights + 2 * step, weights + 3 * step
        a0 = a1 = a2 = a3 = splat(ZERO)
        b0 = b1 = b2 = b3 = splat(ZERO)
        c0 = c1 = c2 = c3 = splat(ZERO)
        d0 = d1 = d2 = d3 = splat(ZERO)
        for i in range(0, width, LANES):
            if later > 0:
                ask_for_four(later + size * i, step)
            s, t, u, v = load_f32(x0, i), load_f32(x1, i), load_f32(x2, i), load_f32(x3, i)
            w = load(weights, i)
            a0, a1 = add_to_total(s, w, a0), add_to_total(t, w, a1)
            a2, a3 = add_to_total(u, w, a2), add_to_total(v, w, a3)
            w = load(w1, i)
            b0, b1 = add_to_total(s, w, b0), add_to_total(t, w, b1)
            b2, b3 = add_to_total(u, w, b2), add_to_total(v, w, b3)
            w = load(w2, i)
            c0, c1 = add_to_total(s, w, c0), add_to_total(t, w, c1)
            c2, c3 = add_to_total(u, w, c2), add_to_total(v, w, c3)
            w = load(w3, i)
            d0, d1 = add_to_total(s, w, d0), add_to_total(t, w, d1)
            d2, d3 = add_to_total(u, w, d2), add_to_total(v, w, d3)
        a, b = fold_2(fold_1(a0, b0), fold_1(a1, b1)), fold_2(fold_1(a2, b2), fold_1(a3, b3))
        c, d = fold_2(fold_1(c0, d0), fold_1(c1, d1)), fold_2(fold_1(c2, d2), fold_1(c3, d3))
        put(narrow, 0, fold_8(fold_4(a, b), fold_4(c, d)))

    return narrowed


def narrower_of_pairs(load: Any, size: int, add_to_total: Any, put: Any) -> Any:
    """Return `narrowed(x0, x1, weights, width, step, narrow, later)`: as of `narrower`, of two tokens times eight rows
    of rank. Each result is summed in the same order."""

    @inline
    def add_both(s: Any, t: Any, w: Any, first: Any, second: Any) -> Any:
        """Add the products of two tokens with a row of rank to their sums."""
        return add_to_total(s, w, first), add_to_total(t, w, second)

    @jit
    def narrowed(x0: int, x1: int, weights: int, width: int, step: int, narrow: int, later: int) -> None:
        w1, w2, w3, w4 = weights + step, weights + 2 * step, weights + 3 * step, weights + 4 * step
        w5, w6, w7, later4 = w4 + step, w4 + 2 * step, w4 + 3 * step, later + 4 * step
        a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = splat(ZERO)
        e0 = e1 = f0 = f1 = g0 = g1 = h0 = h1 = splat(ZERO)
        for i in range(0, width, LANES):
            if later > 0:
                ask_for_four(later + size * i, step)
                ask_for_four(later4 + size * i, step)
            s, t = load_f32(x0, i), load_f32(x1, i)
            a0, a1 = add_both(s, t, load(weights, i), a0, a1)
            b0, b1 = add_both(s, t, load(w1, i), b0, b1)
            c0, c1 = add_both(s, t, load(w2, i), c0, c1)
            d0, d1 = add_both(s, t, load(w3, i), d0, d1)
            e0, e1 = add_both(s, t, load(w4, i), e0, e1)
            f0, f1 = add_both(s, t, load(w5, i), f0, f1)
            g0, g1 = add_both(s, t, load(w6, i), g0, g1)
            h0, h1 = add_both(s, t, load(w7, i), h0, h1)
        a, c = fold_2(fold_1(a0, b0), fold_1(a1, b1)), fold_2(fold_1(c0, d0), fold_1(c1, d1))
        e, g = fold_2(fold_1(e0, f0), fold_1(e1, f1)), fold_2(fold_1(g0, h0), fold_1(g1, h1))
        put(narrow, 0, fold_8(fold_4(a, c), fold_4(e, g)))

    return narrowed


def kernel(storage: Storage, *, gated: bool = False, paired: bool = False) -> Kernel:
    """y + x · downᵀ · up, with the rows of rank of each token's own adapter; if `gated`, silu of the first half of it
    times the other. Matrices are of bfloat16 if x may be rounded to it and multiplied pair by pair (`paired`)."""
    load, size = storage.load, storage.size
    put_narrow = store_rounded if paired else store
    narrowed = narrower(load, size, add_product, put_narrow)
    narrowed_by_pairs = narrower(load_f32, 4, add_pair, put_narrow) if paired else narrowed
    two_narrowed = narrower_of_pairs(load, size, add_product, put_narrow)
    two_narrowed_by_pairs = narrower_of_pairs(load_f32, 4, add_pair, put_narrow) if paired else two_narrowed

    each_of_one = 2 if paired else 4  # bytes of a token's product with a row of rank

    @inline
    def put(y: int, out: int, a: int, b: int, first: int, second: int, s0: Any, s1: Any, s2: Any, s3: Any) -> None:
        """One token's sums of a strip."""
        if gated:
            put_gated(y, out, a, b, s0, s2)
            if first > 1:
                put_gated(y, out, a + LANES, b + LANES, s1, s3)
        else:
            add_to(y, a, s0)
            if first > 1:
                add_to(y, a + LANES, s1)
            if second > 0:
                add_to(y, b, s2)
            if second > 1:
                add_to(y, b + LANES, s3)

    @inline
    def ask_for_strip(row: int, a: int, b: int) -> None:
        """Ask for the weights of half a strip from output a on, and of another from b on."""
        for i in range(0, size * HALF, LINE):
            fetch_weights(row + size * a + i)
            fetch_weights(row + size * b + i)

    @inline
    def ask_for_first_strips(places: int, count: int, begin: int, behind: int, step: int) -> None:
        """Ask for the weights of the first strips; halves of a strip begin `behind` outputs apart, strips `step`."""
        for r in range(count):
            row = word(places, r)
            for strip in range(AHEAD):
                ask_for_strip(row, begin + strip * step, begin + behind + strip * step)

    def widener(together: int, whole: bool) -> Any:
        """Return `widened(…)` for so many tokens, and for whole strips or for any."""
        each = together * each_of_one

        @jit
        def widened(
            four: int, tokens: int, a: int, b: int, first: int, second: int, narrow_a: int, narrow_b: int, places: int,
            count: int, ahead: int,
        ) -> None:  # fmt: skip
            """Add to the outputs of a strip: `first` vectors from output a on, and `second` from b on.

            At `four` are the addresses of the tokens' y, then of their results; the first `tokens` are real. At
            `places` are the addresses of the rows of rank. If `ahead` is not 0, the weights `ahead` outputs later are
            prefetched.
            """
            from_b = b if whole or second > 0 else a
            next_a = a + (LANES if whole or first > 1 else 0)
            next_b = from_b + (LANES if whole or second > 1 else 0)
            a0 = a1 = a2 = a3 = splat(ZERO)
            b0 = b1 = b2 = b3 = splat(ZERO)
            c0 = c1 = c2 = c3 = splat(ZERO)
            d0 = d1 = d2 = d3 = splat(ZERO)
            for token in range(together):  # the products below take longer than y comes from the last cache
                y = word(four, token)
                fetch(y + 4 * a)
                fetch(y + 4 * next_a)
                fetch(y + 4 * from_b)
                fetch(y + 4 * next_b)
            for r in range(0, count, 2):
                w, v, n, m = word(places, r), word(places, r + 1), narrow_a + each * r, narrow_b + each * r
                if ahead > 0:
                    ask_for_strip(w, a + ahead, from_b + ahead)
                    ask_for_strip(v, a + ahead, from_b + ahead)
                if paired:
                    if whole:
                        w0, w1 = load_two_interleaved(w, v, a)
                        w2, w3 = load_two_interleaved(w, v, from_b)
                    else:
                        w0, w1 = load_interleaved(w, v, a), load_interleaved(w, v, next_a)
                        w2, w3 = load_interleaved(w, v, from_b), load_interleaved(w, v, next_b)
                    s, t = splat(f32(n, 0)), splat(f32(m, 0))
                    a0, a1 = add_pairs(a0, s, w0), add_pairs(a1, s, w1)
                    a2, a3 = add_pairs(a2, t, w2), add_pairs(a3, t, w3)
                    s, t = splat(f32(n, 1)), splat(f32(m, 1))
                    b0, b1 = add_pairs(b0, s, w0), add_pairs(b1, s, w1)
                    b2, b3 = add_pairs(b2, t, w2), add_pairs(b3, t, w3)
                    if together > PAIR:
                        s, t = splat(f32(n, 2)), splat(f32(m, 2))
                        c0, c1 = add_pairs(c0, s, w0), add_pairs(c1, s, w1)
                        c2, c3 = add_pairs(c2, t, w2), add_pairs(c3, t, w3)
                        s, t = splat(f32(n, 3)), splat(f32(m, 3))
                        d0, d1 = add_pairs(d0, s, w0), add_pairs(d1, s, w1)
                        d2, d3 = add_pairs(d2, t, w2), add_pairs(d3, t, w3)
                else:
                    for i in range(2):
                        u = v if i > 0 else w
                        w0, w1, w2, w3 = load(u, a), load(u, next_a), load(u, from_b), load(u, next_b)
                        s, t = splat(f32(n, i)), splat(f32(m, i))
                        a0, a1 = multiply_add(s, w0, a0), multiply_add(s, w1, a1)
                        a2, a3 = multiply_add(t, w2, a2), multiply_add(t, w3, a3)
                        s, t = splat(f32(n, 2 + i)), splat(f32(m, 2 + i))
                        b0, b1 = multiply_add(s, w0, b0), multiply_add(s, w1, b1)
                        b2, b3 = multiply_add(t, w2, b2), multiply_add(t, w3, b3)
                        if together > PAIR:
                            s, t = splat(f32(n, 4 + i)), splat(f32(m, 4 + i))
                            c0, c1 = multiply_add(s, w0, c0), multiply_add(s, w1, c1)
                            c2, c3 = multiply_add(t, w2, c2), multiply_add(t, w3, c3)
                            s, t = splat(f32(n, 6 + i)), splat(f32(m, 6 + i))
                            d0, d1 = multiply_add(s, w0, d0), multiply_add(s, w1, d1)
                            d2, d3 = multiply_add(t, w2, d2), multiply_add(t, w3, d3)
            put(word(four, 0), word(four, TOGETHER), a, b, first, second, a0, a1, a2, a3)
            if tokens > 1:
                put(word(four, 1), word(four, TOGETHER + 1), a, b, first, second, b0, b1, b2, b3)
            if together > PAIR and tokens > 2:
                put(word(four, 2), word(four, TOGETHER + 2), a, b, first, second, c0, c1, c2, c3)
            if together > PAIR and tokens > 3:
                put(word(four, 3), word(four, TOGETHER + 3), a, b, first, second, d0, d1, d2, d3)

        return widened

    four_whole, four_any, two_whole, two_any = (
        widener(together, whole) for together in (TOGETHER, PAIR) for whole in (True, False)
    )

    @inline
    def widened(
        together: int, four: int, tokens: int, a: int, b: int, first: int, second: int, narrow_a: int, narrow_b: int,
        places: int, count: int, ahead: int,
    ) -> None:  # fmt: skip
        """Add to the outputs of a strip, of two or of four tokens."""
        whole = first + second == STRIP // LANES
        if together == PAIR:
            if whole:
                two_whole(four, tokens, a, b, first, second, narrow_a, narrow_b, places, count, ahead)
            else:
                two_any(four, tokens, a, b, first, second, narrow_a, narrow_b, places, count, ahead)
        elif whole:
            four_whole(four, tokens, a, b, first, second, narrow_a, narrow_b, places, count, ahead)
        else:
            four_any(four, tokens, a, b, first, second, narrow_a, narrow_b, places, count, ahead)

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        take(frame, job)
        job.modules = dim(frame.spans, 0)
        job.rows = dim(frame.up, 0)
        units = dim(frame.owners, 1)
        job.units = units
        inputs = dim(frame.x, 1)
        job.inputs = inputs
        job.pairs = inputs // 2 if paired and inputs % (2 * LANES) == 0 else 0
        job.outputs = dim(frame.y, 1)
        job.results = dim(frame.out, 1)
        owners = frame.owners.data + 4 * units * frame.settings.place
        job.owners = owners
        order, slots = job.order, job.slots
        tokens, listed = dim(frame.x, 0), dim(frame.order, 0)
        # Tiles that are small enough for all threads, as long as they have four tokens.
        share = (tokens + threads - 1) // max(1, threads)
        most = max(TOGETHER, min(TILE, (share + TOGETHER - 1) // TOGETHER * TOGETHER))
        tiles = malloc(2 * WORD * max(1, listed))
        job.tiles = tiles
        count = begin = 0
        while begin < listed:
            slot = i32(slots, begin)
            end = begin
            while end < listed and end - begin < most and i32(slots, end) == slot and is_token(order, end, tokens):
                end += 1
            if end > begin and (gated or owns(owners, units, slot)):
                set_word(tiles, 2 * count, begin)
                set_word(tiles, 2 * count + 1, end)
                count += 1
            begin = max(end, begin + 1)
        parts = 1
        if count < threads:
            parts = GATED_PARTS if gated else job.modules
        job.parts = parts
        return count * parts

    @inline
    def widen_gated(
        job: Any, together: int, four: int, tokens: int, begin: int, end: int, narrow: int, places: int, count: int,
        ahead: int,
    ) -> None:  # fmt: skip
        """Add to the gates [begin, end) and their ups, and store the gated results."""
        narrow_ups = narrow + (job.modules - 1) * together * each_of_one * count
        for a in range(begin, end, HALF):
            vectors = min(HALF, end - a) // LANES
            widened(
                together, four, tokens, a, a + job.results, vectors, vectors, narrow, narrow_ups, places, count,
                ahead * HALF,
            )  # fmt: skip

    @inline
    def begin_of(job: Any, module: int) -> int:
        return 0 if module == 0 else i32(job.spans, module - 1)

    @inline
    def widen_module(
        job: Any, together: int, four: int, tokens: int, module: int, narrow: int, places: int, count: int, ahead: int
    ) -> None:
        """The outputs of a module."""
        begin, end = begin_of(job, module), min(i32(job.spans, module), job.outputs)
        for a in range(begin, end, STRIP):
            vectors = min(STRIP, end - a) // LANES
            first = min(HALF // LANES, vectors)
            widened(
                together, four, tokens, a, a + HALF, first, vectors - first, narrow, narrow, places, count,
                ahead * STRIP,
            )  # fmt: skip

    @inline
    def down_of(job: Any, module: int, row: int) -> int:
        """Return the address of a row of rank of a module."""
        return job.down + size * job.inputs * (module * job.rows + row)

    @inline
    def row_of(job: Any, token: int, normed: int, rounded: int) -> int:
        """Return where a token's x is as it is multiplied: normed, in memory at `normed`, and rounded to bfloat16, in
        that at `rounded`."""
        x = job.x + 4 * job.inputs * token
        if job.norm > 0:
            normalise(x, job.norm, job.eps, job.inputs, normed)
            x = normed
        if paired and job.pairs > 0:
            for i in range(0, job.inputs, LANES):
                store_rounded(rounded, i, load_f32(x, i))
            x = rounded
        return x

    @inline
    def gate_alone(job: Any, at: int, behind: int, begin: int, end: int) -> None:
        """The results [begin, end) of tokens without an adapter."""
        for token in range(at, behind):
            t = i32(job.order, token)
            y, out = job.y + 4 * job.outputs * t, job.out + 4 * job.results * t
            for o in range(begin, end, LANES):
                store(out, o, multiply(silu(load_f32(y, o)), load_f32(y, job.results + o)))

    @jit
    def block(job: Any, index: int) -> None:
        modules, all_rows, inputs, parts = job.modules, job.rows, job.inputs, job.parts
        order, vectors = job.order, job.results // LANES
        tile, part = index // parts, index % parts
        at, behind = word(job.tiles, 2 * tile), word(job.tiles, 2 * tile + 1)
        begin, end = LANES * first_unit(part, parts, vectors), LANES * first_unit(part + 1, parts, vectors)
        first, last = (part, part + 1) if parts > 1 and not gated else (0, modules)
        pairs = job.pairs
        kept = inputs if job.norm > 0 else 0  # of a token's normed x
        rows = malloc((2 * all_rows + 2 * TOGETHER) * WORD + 4 * TOGETHER * (all_rows * modules + pairs + kept))
        places = rows + WORD * all_rows
        four = places + WORD * all_rows
        rounded = four + 2 * WORD * TOGETHER
        normed = rounded + 4 * TOGETHER * pairs
        narrow = normed + 4 * TOGETHER * kept
        row, half = 4 * kept, 4 * pairs  # bytes of a normed and of a rounded row
        unit = all_rows // job.units
        count = list_rows(job.owners, job.units, unit, i32(job.slots, at), rows)
        for r in range(count):
            set_word(places, r, job.up + size * job.outputs * word(rows, r))
        if gated and count == 0:
            gate_alone(job, at, behind, begin, end)
            at = behind
        ahead = AHEAD  # while the first tokens are multiplied
        if gated and count > 0:
            ask_for_first_strips(places, count, begin, job.results, HALF)
        while at < behind:
            for i in range(TOGETHER):
                token = i32(order, min(at + i, behind - 1))
                set_word(four, i, job.y + 4 * job.outputs * token)
                set_word(four, TOGETHER + i, job.out + 4 * job.results * token)
            tokens = min(TOGETHER, behind - at)
            x0 = x1 = x2 = x3 = row_of(job, i32(order, at), normed, rounded)
            if tokens > 1:
                x1 = row_of(job, i32(order, at + 1), normed + row, rounded + half)
            if tokens > 2:
                x2 = row_of(job, i32(order, at + 2), normed + 2 * row, rounded + 2 * half)
            if tokens > 3:
                x3 = row_of(job, i32(order, at + 3), normed + 3 * row, rounded + 3 * half)
            together, step = TOGETHER, TOGETHER
            if tokens <= PAIR and unit % ROWS_OF_PAIR == 0:
                together, step = PAIR, ROWS_OF_PAIR
            each = together * each_of_one
            for module in range(first, last):
                own = narrow + each * count * module
                if not gated and ahead > 0:
                    ask_for_first_strips(places, count, begin_of(job, module), HALF, STRIP)
                for r in range(0, count, step):
                    weights, out, later = down_of(job, module, word(rows, r)), own + each * r, 0
                    if ahead > 0 and r + step < count:
                        later = down_of(job, module, word(rows, r + step))
                    elif ahead > 0 and module + 1 < last:
                        later = down_of(job, module + 1, word(rows, 0))
                    if together == PAIR:
                        if pairs > 0:
                            two_narrowed_by_pairs(x0, x1, weights, pairs, 4 * pairs, out, later)
                        else:
                            two_narrowed(x0, x1, weights, inputs, size * inputs, out, later)
                    elif pairs > 0:
                        narrowed_by_pairs(x0, x1, x2, x3, weights, pairs, 4 * pairs, out, later)
                    else:
                        narrowed(x0, x1, x2, x3, weights, inputs, size * inputs, out, later)
                if not gated:
                    widen_module(job, together, four, tokens, module, own, places, count, ahead)
            if gated:
                widen_gated(job, together, four, tokens, begin, end, narrow, places, count, ahead)
            at += TOGETHER
            ahead = 0
        free(rows)

    @jit
    def finish(job: Any) -> None:
        free(job.tiles)

    return Kernel(kernel_table.ADAPTER_GATE if gated else kernel_table.ADAPTER, JOB, prepare, block, finish)
