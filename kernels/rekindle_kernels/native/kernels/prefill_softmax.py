"""Online softmax of the rows of a tile: logits become weights, and what was summed so far is rescaled.

Axes: D head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native.kernels.attention_job import MASKED
from rekindle_kernels.native.kernels.prefill_tiles import KEYS
from rekindle_kernels.native.language.dot_products import store_rounded, times_power_of_two
from rekindle_kernels.native.language.jit import inline
from rekindle_kernels.native.language.memory import f32, set_f32
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
)
from rekindle_kernels.native.language.vector_math import exp, exp_of_one, tanh

LAST = KEYS - LANES
ZERO, ONE, EIGHT = np.float32(0), np.float32(1), np.float32(8)
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
    """What logits are multiplied by: they are kept in the unit of their exponential, 2^x where pages are paired."""
    return LOG2_E if paired else ONE


def softmax_function(D: int, paired: bool) -> Any:
    """`softmax_row(job, logits, low, high, top_at, sums, out)` for heads of that size."""
    put, exponential, unit = (store_rounded if paired else store), (power if paired else exp), unit_of(paired)
    # How far logits may rise above what weights are relative to, before what was summed is rescaled: that costs more
    # than the rest of a row, and a weight of 2^8 has as many bits as one of 1.
    slack = EIGHT if paired else ZERO

    @inline
    def softmax_row(job: Any, logits: int, low: int, high: int, top_at: int, sums: int, out: int) -> None:
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
            for column in range(0, D, LANES):
                store(out, column, multiply(load_f32(out, column), splat(keep)))
        set_f32(top_at, 0, top)
        store(sums, 0, multiply_add(load_f32(sums, 0), splat(keep), add(add(a, b), add(c, d))))

    return softmax_row
