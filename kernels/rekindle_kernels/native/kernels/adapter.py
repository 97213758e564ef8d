"""Products of adapters: each token's row times the rows of rank of its own adapter, and those times their outputs.

XLA would multiply all tokens with all adapters, or make a loop of products, and end a run of native calls.

Threads take tiles of tokens with one adapter, module by module. Four tokens are multiplied together, with the last one
several times where there are fewer: reading the weights takes longer than that, and a token's numbers are added in the
same order whatever is beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.language.handler import Kernel, job_layout
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import f32, free, i32, malloc, set_f32, set_word, word
from rekindle_kernels.native.language.records import dim
from rekindle_kernels.native.language.vector import LANES, Storage, add, load_f32, multiply_add, splat, store, total
from rekindle_kernels.native.layout import WORD

TILE = 16  # tokens at most
TOGETHER = 4  # tokens, and rows of rank
WIDE = 4 * LANES  # outputs that are summed in registers
ZERO = np.float32(0)

JOB = job_layout(
    "adapter",
    {
        "y": "[tokens, outputs]",
        "x": "[tokens, inputs]",
        "down": "[modules · rows, inputs]",
        "up": "[rows, outputs]",
        "owners": "[units]: the adapter of each",
        "order": "the tokens, those of an adapter together",
        "slots": "the adapter of each token in that order",
        "spans": "[modules]: where the outputs of each end",
        "tiles": "[2] of each tile: where it begins and ends in the order",
        "modules": "",
        "rows": "of rank",
        "units": "that share these rows",
        "inputs": "",
        "outputs": "",
    },
)


@inline
def adapter_at(order: int, slots: int, index: int, tokens: int) -> int:
    """Return the adapter slot of the token at an index of the sorted order, or 0 if that entry is padding."""
    token = i32(order, index)
    return i32(slots, index) if token >= 0 and token < tokens else 0


@inline
def owns(owners: int, units: int, slot: int) -> bool:
    """True if a unit is that adapter's."""
    has = False
    for unit in range(units):
        has = has or i32(owners, unit) == slot
    return has


@inline
def list_rows(owners: int, units: int, each: int, slot: int, rows: int) -> int:
    """List the rows of rank that are an adapter's, and return how many there are."""
    count = 0
    for unit in range(units):
        if i32(owners, unit) == slot:
            for row in range(unit * each, (unit + 1) * each):
                set_word(rows, count, row)
                count += 1
    return count


@inline
def set_four(narrow: int, a: Any, b: Any, c: Any, d: Any) -> None:
    """Store the sums of four vectors."""
    set_f32(narrow, 0, total(a))
    set_f32(narrow, 1, total(b))
    set_f32(narrow, 2, total(c))
    set_f32(narrow, 3, total(d))


@inline
def add_to(y: int, at: int, delta: Any) -> None:
    """Add a vector to the outputs from `at` on."""
    store(y, at, add(load_f32(y, at), delta))


def kernel(storage: Storage) -> Kernel:
    """y + x · downᵀ · up, with the rows of rank of each token's own adapter."""
    load, size = storage.load, storage.size

    @jit
    def narrowed(x0: int, x1: int, x2: int, x3: int, weights: int, inputs: int, narrow: int, stride: int) -> None:
        """Four tokens times four rows of rank; the next token's results are `stride` numbers on."""
        w1, w2, w3 = weights + size * inputs, weights + 2 * size * inputs, weights + 3 * size * inputs
        a0 = a1 = a2 = a3 = splat(ZERO)
        b0 = b1 = b2 = b3 = splat(ZERO)
        c0 = c1 = c2 = c3 = splat(ZERO)
        d0 = d1 = d2 = d3 = splat(ZERO)
        for i in range(0, inputs, LANES):
            a, b, c, d = load_f32(x0, i), load_f32(x1, i), load_f32(x2, i), load_f32(x3, i)
            w = load(weights, i)
            a0, b0 = multiply_add(a, w, a0), multiply_add(b, w, b0)
            c0, d0 = multiply_add(c, w, c0), multiply_add(d, w, d0)
            w = load(w1, i)
            a1, b1 = multiply_add(a, w, a1), multiply_add(b, w, b1)
            c1, d1 = multiply_add(c, w, c1), multiply_add(d, w, d1)
            w = load(w2, i)
            a2, b2 = multiply_add(a, w, a2), multiply_add(b, w, b2)
            c2, d2 = multiply_add(c, w, c2), multiply_add(d, w, d2)
            w = load(w3, i)
            a3, b3 = multiply_add(a, w, a3), multiply_add(b, w, b3)
            c3, d3 = multiply_add(c, w, c3), multiply_add(d, w, d3)
        set_four(narrow, a0, a1, a2, a3)
        set_four(narrow + 4 * stride, b0, b1, b2, b3)
        set_four(narrow + 8 * stride, c0, c1, c2, c3)
        set_four(narrow + 12 * stride, d0, d1, d2, d3)

    @jit
    def widened(
        y0: int, y1: int, y2: int, y3: int, tokens: int, up: int, begin: int, end: int, outputs: int,
        narrow: int, stride: int, rows: int, count: int,
    ) -> None:  # fmt: skip
        """Add the outputs [begin, end) of the first `tokens` of four."""
        n1, n2, n3 = narrow + 4 * stride, narrow + 8 * stride, narrow + 12 * stride
        wide = begin + (end - begin) // WIDE * WIDE
        for o in range(begin, wide, WIDE):
            a0 = a1 = a2 = a3 = splat(ZERO)
            b0 = b1 = b2 = b3 = splat(ZERO)
            c0 = c1 = c2 = c3 = splat(ZERO)
            d0 = d1 = d2 = d3 = splat(ZERO)
            for r in range(count):
                w = up + size * (word(rows, r) * outputs + o)
                w0, w1, w2, w3 = load(w, 0), load(w, LANES), load(w, 2 * LANES), load(w, 3 * LANES)
                n = splat(f32(narrow, r))
                a0, a1 = multiply_add(n, w0, a0), multiply_add(n, w1, a1)
                a2, a3 = multiply_add(n, w2, a2), multiply_add(n, w3, a3)
                n = splat(f32(n1, r))
                b0, b1 = multiply_add(n, w0, b0), multiply_add(n, w1, b1)
                b2, b3 = multiply_add(n, w2, b2), multiply_add(n, w3, b3)
                n = splat(f32(n2, r))
                c0, c1 = multiply_add(n, w0, c0), multiply_add(n, w1, c1)
                c2, c3 = multiply_add(n, w2, c2), multiply_add(n, w3, c3)
                n = splat(f32(n3, r))
                d0, d1 = multiply_add(n, w0, d0), multiply_add(n, w1, d1)
                d2, d3 = multiply_add(n, w2, d2), multiply_add(n, w3, d3)
            add_to(y0, o, a0)
            add_to(y0, o + LANES, a1)
            add_to(y0, o + 2 * LANES, a2)
            add_to(y0, o + 3 * LANES, a3)
            if tokens > 1:
                add_to(y1, o, b0)
                add_to(y1, o + LANES, b1)
                add_to(y1, o + 2 * LANES, b2)
                add_to(y1, o + 3 * LANES, b3)
            if tokens > 2:
                add_to(y2, o, c0)
                add_to(y2, o + LANES, c1)
                add_to(y2, o + 2 * LANES, c2)
                add_to(y2, o + 3 * LANES, c3)
            if tokens > 3:
                add_to(y3, o, d0)
                add_to(y3, o + LANES, d1)
                add_to(y3, o + 2 * LANES, d2)
                add_to(y3, o + 3 * LANES, d3)
        for o in range(wide, end, LANES):
            a = b = c = d = splat(ZERO)
            for r in range(count):
                w = load(up + size * (word(rows, r) * outputs + o), 0)
                a, b = multiply_add(splat(f32(narrow, r)), w, a), multiply_add(splat(f32(n1, r)), w, b)
                c, d = multiply_add(splat(f32(n2, r)), w, c), multiply_add(splat(f32(n3, r)), w, d)
            add_to(y0, o, a)
            if tokens > 1:
                add_to(y1, o, b)
            if tokens > 2:
                add_to(y2, o, c)
            if tokens > 3:
                add_to(y3, o, d)

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        job.y, job.x = frame.out.data, frame.x.data
        job.down, job.up = frame.down.data, frame.up.data
        job.order, job.slots, job.spans = frame.order.data, frame.slots.data, frame.spans.data
        job.modules = dim(frame.spans, 0)
        job.rows = dim(frame.up, 0)
        units = dim(frame.owners, 1)
        job.units = units
        job.inputs = dim(frame.x, 1)
        job.outputs = dim(frame.y, 1)
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
            slot = adapter_at(order, slots, begin, tokens)
            end = begin + 1
            while end < listed and end - begin < most and adapter_at(order, slots, end, tokens) == slot:
                end += 1
            if slot > 0 and owns(owners, units, slot):
                set_word(tiles, 2 * count, begin)
                set_word(tiles, 2 * count + 1, end)
                count += 1
            begin = end
        return count * job.modules

    @jit
    def block(job: Any, index: int) -> None:
        modules, all_rows, inputs, outputs = job.modules, job.rows, job.inputs, job.outputs
        x, y, order, up = job.x, job.y, job.order, job.up
        tile, module = index // modules, index % modules
        at, behind = word(job.tiles, 2 * tile), word(job.tiles, 2 * tile + 1)
        begin = 0 if module == 0 else i32(job.spans, module - 1)
        end = min(i32(job.spans, module), outputs)
        down = job.down + size * module * all_rows * inputs
        rows = malloc((WORD + 4 * TOGETHER) * all_rows)
        narrow = rows + WORD * all_rows
        count = list_rows(job.owners, job.units, all_rows // job.units, i32(job.slots, at), rows)
        while at < behind:
            last = behind - 1
            t0, t1 = i32(order, at), i32(order, min(at + 1, last))
            t2, t3 = i32(order, min(at + 2, last)), i32(order, min(at + 3, last))
            x0, x1, x2, x3 = x + 4 * inputs * t0, x + 4 * inputs * t1, x + 4 * inputs * t2, x + 4 * inputs * t3
            for r in range(0, count, TOGETHER):
                weights = down + size * inputs * word(rows, r)
                narrowed(x0, x1, x2, x3, weights, inputs, narrow + 4 * r, all_rows)
            y0, y1, y2, y3 = y + 4 * outputs * t0, y + 4 * outputs * t1, y + 4 * outputs * t2, y + 4 * outputs * t3
            tokens = min(TOGETHER, behind - at)
            widened(y0, y1, y2, y3, tokens, up, begin, end, outputs, narrow, all_rows, rows, count)
            at += TOGETHER
        free(rows)

    @jit
    def finish(job: Any) -> None:
        free(job.tiles)

    return Kernel(kernel_table.ADAPTER, JOB, prepare, block, finish)
