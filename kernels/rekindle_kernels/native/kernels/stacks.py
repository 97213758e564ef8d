"""Where a matrix begins in a stack of them, for products that read it in place."""

from __future__ import annotations

from typing import Any

from rekindle_kernels.native.language.jit import inline
from rekindle_kernels.native.language.memory import i32
from rekindle_kernels.native.language.records import dim


@inline
def first_row(frame: Any, rows: int) -> int:
    """Return the row of the arrays at which the matrix of `expert` begins, which has so many; 0 without a stack.

    An index is taken as `jax.lax.dynamic_index_in_dim` takes it: from the end if it is negative, and clamped.
    """
    first = 0
    if frame.has_expert:
        count, expert = dim(frame.weight, 0) // max(1, rows), i32(frame.expert.data, 0)
        if expert < 0:
            expert += count
        first = max(0, min(expert, count - 1)) * rows
    return first
