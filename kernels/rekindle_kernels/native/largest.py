"""The index of the largest number of each row: XLA:CPU reads the rows twice, on one thread."""

from __future__ import annotations

import numpy as np

from rekindle_kernels.native.memory import f32, set_i32
from rekindle_kernels.native.target import Kernel, dim, field, inline, jit, nothing, operand, result, set_field
from rekindle_kernels.native.vector import LANES, larger, largest, load_f32, splat

STRETCH = 16 * LANES  # numbers of which only the largest is looked for at first
LOWEST = np.float32(-np.inf)


@inline
def first_largest(x: int, width: int) -> int:
    """The first index of the largest of [width]; the last index where all are NaN."""
    top, start = LOWEST, 0
    for begin in range(0, width // STRETCH * STRETCH, STRETCH):
        a = b = splat(LOWEST)
        for at in range(begin, begin + STRETCH, 2 * LANES):
            a, b = larger(load_f32(x, at), a), larger(load_f32(x, at + LANES), b)
        here = largest(larger(a, b))
        if here > top:
            top, start = here, begin
    for at in range(width // STRETCH * STRETCH, width):
        if f32(x, at) > top:
            top, start = f32(x, at), at
    for at in range(start, width):
        if f32(x, at) == top:
            return at
    return width - 1


def kernel(name: str) -> Kernel:
    """`(x [R, N] float32) -> [R] int32`: the first index of each row's largest; N - 1 in a row of NaN."""
    X, OUT, N = range(3)

    @jit
    def prepare(frame: int, job: int, threads: int) -> int:
        set_field(job, X, operand(frame, 0))
        set_field(job, OUT, result(frame, 0))
        set_field(job, N, dim(frame, 0, 1))
        return dim(frame, 0, 0)

    @jit
    def block(job: int, index: int) -> None:
        x = field(job, X) + index * field(job, N) * 4
        set_i32(field(job, OUT), index, first_largest(x, field(job, N)))

    return Kernel(name, prepare, block, nothing)
