"""What makes of a gated MLP's first product, gates and ups, what its last one multiplies: silu(gate) · up.

The first product does it block by block, while they are in the cache: a pass of its own would write and read them all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native.exponential import LOWEST, exp
from rekindle_kernels.native.target import inline
from rekindle_kernels.native.vector import (
    add,
    divide,
    larger,
    magnitude,
    multiply,
    splat,
    where_negative,
)

ONE, MINUS_ONE = np.float32(1), np.float32(-1)


@inline
def silu(x: Any) -> Any:
    """x / (1 + e^-x) of a vector; the exponential's argument is never above 0."""
    small = exp(multiply(magnitude(x), splat(MINUS_ONE)))  # never 0, and x may be as large as numbers are
    return divide(multiply(larger(x, splat(LOWEST)), where_negative(x, small, splat(ONE))), add(splat(ONE), small))
