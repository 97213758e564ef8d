"""The index of the largest number of each row: XLA:CPU reads the rows twice, on one thread."""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.language.handler import Kernel, job_layout, nothing
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import f32, set_i32
from rekindle_kernels.native.language.records import dim
from rekindle_kernels.native.language.vector import LANES, larger, largest, load_f32, splat

STRETCH = 16 * LANES  # numbers: their largest is found first, its place only in the stretch that has the row's largest
LOWEST = np.float32(-np.inf)

JOB = job_layout("argmax", {"x": "[rows, width]", "out": "int32 [rows]", "width": ""})


@inline
def first_largest(x: int, width: int) -> int:
    """Return the first index of the largest of [width]; the last index where all are NaN."""
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


def kernel() -> Kernel:
    """Return the first index of the largest of every row of x."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        job.x = frame.x.data
        job.out = frame.out.data
        job.width = dim(frame.x, 1)
        return dim(frame.x, 0)

    @jit
    def block(job: Any, index: int) -> None:
        x = job.x + index * job.width * 4
        set_i32(job.out, index, first_largest(x, job.width))

    return Kernel(kernel_table.ARGMAX, JOB, prepare, block, nothing)
