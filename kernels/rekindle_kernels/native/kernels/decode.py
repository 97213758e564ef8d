"""Decode attention that reads pages where they lie: one query per row, each key and value read once, online softmax.

Work is divided by (row, stretch of keys, kv head). A stretch's logits are computed first, then its softmax, then the
weighted sum of its values; rows of several stretches are merged at the end.

Axes: R rows, H query heads, K kv heads, G = H/K, D head size, P pages, S page size, W page-table width.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.kernels.attention_job import FIELDS, NUMBERS, StoredHeads, describe, length_of, sink_of
from rekindle_kernels.native.kernels.decode_products import logits_function, scale_values, value_sums, weights_of
from rekindle_kernels.native.language.handler import Kernel, job_layout
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import f32, free, i32, malloc, set_f32, set_i32
from rekindle_kernels.native.language.vector import LANES, load_f32, multiply, splat, store
from rekindle_kernels.native.language.vector_math import exp_of_one

RECORD = 2  # numbers of a partial result beside the values: the largest logit, the sum of weights
ZERO, ONE = np.float32(0), np.float32(1)

JOB = job_layout(
    "decode",
    {
        **FIELDS,
        "partial": "[pieces, heads, head_dim + RECORD], of rows that are cut into several pieces",
        "work": "int32 [pieces, 2]: the row and the first key of each piece",
        "keys": "of a piece",
        "pieces": "",
    },
    numbers=NUMBERS,
)


@inline
def first_key(job: Any, length: int) -> int:
    """Return the first key that the window of a row's query shows."""
    return max(0, length - job.window) if job.window > 0 else 0


@inline
def list_pieces(job: Any, rows: int) -> None:
    """Note where every piece begins; rows of one piece after another."""
    pieces = 0
    for r in range(rows):
        length = length_of(job, r)
        first = first_key(job, length)
        for piece in range((length - first + job.keys - 1) // job.keys):
            set_i32(job.work, 2 * pieces, r)
            set_i32(job.work, 2 * pieces + 1, first + piece * job.keys)
            pieces += 1
    job.pieces = pieces


def preparer(D: int) -> Any:
    """Return `prepare(frame, job, threads)` for heads of that size."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        describe(frame, job)
        rows, H = frame.settings.decode_rows, job.heads
        job.keys = frame.settings.keys
        pieces = 0
        for r in range(rows):
            length = length_of(job, r)
            pieces += max(0, length - first_key(job, length) + job.keys - 1) // job.keys
            if length <= 0:
                for at in range(r * H * D, (r + 1) * H * D):
                    set_f32(job.out, at, ZERO)
        job.partial = malloc(pieces * (H * (D + RECORD) + 2) * 4)
        job.work = job.partial + pieces * H * (D + RECORD) * 4
        list_pieces(job, rows)
        return pieces * job.kv_heads

    return prepare


def scaler(D: int) -> Any:
    """Return `divide_by_weights(out, top, weights, sink)`: a sum of values becomes their mean, the sink's weight
    included."""

    @inline
    def divide_by_weights(out: int, top: float, weights: float, sink: float) -> None:
        if sink > top:
            weights = weights * exp_of_one(top - sink) + ONE
            factor = exp_of_one(top - sink) / weights
        else:
            factor = ONE / (weights + exp_of_one(sink - top))
        for d in range(0, D, LANES):
            store(out, d, multiply(load_f32(out, d), splat(factor)))

    return divide_by_weights


def merger(D: int) -> Any:
    """Return `merge(job, r, h, piece, after)`: one head of row r from the partial results of the pieces [piece,
    after)."""

    @inline
    def merge(job: Any, r: int, h: int, piece: int, after: int) -> None:
        H = job.heads
        out = job.out + (r * H + h) * D * 4
        top = sink_of(job, h)
        for p in range(piece, after):
            top = max(top, f32(job.partial + (p * H + h) * (D + RECORD) * 4, D))
        weights = exp_of_one(sink_of(job, h) - top)
        for d in range(D):
            set_f32(out, d, ZERO)
        for p in range(piece, after):
            record = job.partial + (p * H + h) * (D + RECORD) * 4
            factor = exp_of_one(f32(record, D) - top)
            weights += f32(record, D + 1) * factor
            for d in range(D):
                set_f32(out, d, f32(out, d) + f32(record, d) * factor)
        for d in range(D):
            set_f32(out, d, f32(out, d) / weights)

    return merge


def kernel(stored: StoredHeads) -> Kernel:
    """Attention of one query per row over the row's pages. Rows from the setting `decode_rows` on are left alone."""
    D, scaled = stored.head_dim, stored.scaled
    logits_of, weigh_heads = logits_function(stored), value_sums(stored)
    prepare, divide_by_weights, merge = preparer(D), scaler(D), merger(D)

    @jit
    def block(job: Any, index: int) -> None:
        """One piece of a row for one kv head."""
        K, keys = job.kv_heads, job.keys
        G = job.heads // K
        piece, k = index // K, index % K
        r, begin = i32(job.work, 2 * piece), i32(job.work, 2 * piece + 1)
        length = length_of(job, r)
        end = min(length, begin + keys)
        logits = malloc(G * (keys + 2) * 4)
        tops = logits + G * keys * 4
        logits_of(job, r, k, begin, end, logits)
        whole = length - first_key(job, length) <= keys
        record = job.partial + (piece * job.heads + k * G) * (D + RECORD) * 4
        out = job.out + (r * job.heads + k * G) * D * 4 if whole else record
        step = D if whole else D + RECORD
        for g in range(G):
            mine = logits + g * keys * 4
            top, weights = weights_of(job, end - begin, mine)
            if scaled:
                scale_values(job, r, k, begin, end, mine)
            # What the values are divided by, once they are summed: kept beside the logits.
            set_f32(tops, 2 * g, top)
            set_f32(tops, 2 * g + 1, weights)
        weigh_heads(job, r, k, begin, end, logits, out, step)
        for g in range(G):
            top, weights, here = f32(tops, 2 * g), f32(tops, 2 * g + 1), out + g * step * 4
            if whole:
                divide_by_weights(here, top, weights, sink_of(job, k * G + g))
            else:
                set_f32(here, D, top)
                set_f32(here, D + 1, weights)
        free(logits)

    @jit
    def finish(job: Any) -> None:
        """Merge the rows of several pieces, which follow each other."""
        H, pieces = job.heads, job.pieces
        piece = 0
        while piece < pieces:
            r, after = i32(job.work, 2 * piece), piece + 1
            while after < pieces and i32(job.work, 2 * after) == r:
                after += 1
            if after > piece + 1:
                for h in range(H):
                    merge(job, r, h, piece, after)
            piece = after
        free(job.partial)

    return Kernel(kernel_table.DECODE, JOB, prepare, block, finish)
