"""What a gated MLP's last product multiplies, silu(gate) · up, made from rows that hold the gates first and then ups.

Whoever multiplies such rows makes this of them on the way: as a pass of its own it writes and reads all of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native.exponential import LOWEST, exp
from rekindle_kernels.native.target import inline
from rekindle_kernels.native.vector import (
    LANES,
    add,
    divide,
    larger,
    load_f32,
    magnitude,
    multiply,
    splat,
    store,
    where_negative,
)

ONE, MINUS_ONE = np.float32(1), np.float32(-1)


@inline
def silu(x: Any) -> Any:
    """x / (1 + e^-x) of a vector; the exponential's argument is never above 0."""
    small = exp(multiply(magnitude(x), splat(MINUS_ONE)))  # never 0, and x may be as large as numbers are
    return divide(multiply(larger(x, splat(LOWEST)), where_negative(x, small, splat(ONE))), add(splat(ONE), small))


@inline
def gate(x: int, width: int, out: int) -> None:
    """One row [2 · width] -> [width]."""
    for k in range(0, width, LANES):
        store(out, k, multiply(silu(load_f32(x, k)), load_f32(x, width + k)))
