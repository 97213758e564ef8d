"""RMS norm of rows: as a call by itself, of which XLA:CPU makes five, or on the way into a product."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.language.handler import Kernel, job_layout, nothing
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import f32
from rekindle_kernels.native.language.records import dim
from rekindle_kernels.native.language.vector import (
    LANES,
    add,
    load_f32,
    multiply,
    multiply_add,
    splat,
    store,
    to_22_bits,
    total,
)

ROWS = 16  # of a block
ZERO, ONE = np.float32(0), np.float32(1)

JOB = job_layout(
    "norm",
    {
        "x": "[rows, width]",
        "weight": "[width]",
        "residual": "[rows, width], or 0",
        "factor": "[1], or 0",
        "out": "[rows, width]",
        "rows": "",
        "width": "",
    },
    numbers={"eps": "added to the mean square"},
)


@inline
def normalise(x: int, weight: int, eps: float, width: int, out: int) -> None:
    """One row, whose width is a multiple of two vectors."""
    a = b = splat(ZERO)
    for e in range(0, width, 2 * LANES):
        y, z = load_f32(x, e), load_f32(x, e + LANES)
        a, b = multiply_add(y, y, a), multiply_add(z, z, b)
    mean = total(add(a, b)) / np.float32(width)
    factor = splat(ONE / np.float32(math.sqrt(mean + eps)))
    for e in range(0, width, LANES):
        store(out, e, multiply(multiply(load_f32(x, e), factor), load_f32(weight, e)))


@inline
def add_row(residual: int, factor: int, width: int, out: int) -> None:
    """Add a row of the residual to a result, and multiply their sum."""
    if factor == 0:
        for e in range(0, width, LANES):
            store(out, e, add(load_f32(residual, e), load_f32(out, e)))
    else:
        for e in range(0, width, LANES):
            y = add(load_f32(residual, e), load_f32(out, e))
            store(out, e, to_22_bits(multiply(y, splat(f32(factor, 0)))))


def kernel() -> Kernel:
    """x / rms(x) · weight for every row of x, and what is added to it."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        job.x = frame.x.data
        job.weight = frame.weight.data
        job.residual = frame.residual.data if frame.has_residual else 0
        job.factor = frame.factor.data if frame.has_factor else 0
        job.out = frame.out.data
        job.eps = frame.settings.eps
        job.rows = dim(frame.x, 0)
        job.width = dim(frame.x, 1)
        return (job.rows + ROWS - 1) // ROWS

    @jit
    def block(job: Any, index: int) -> None:
        width = job.width
        for row in range(index * ROWS, min(job.rows, (index + 1) * ROWS)):
            at = row * width * 4
            normalise(job.x + at, job.weight, job.eps, width, job.out + at)
            if job.residual != 0:
                add_row(job.residual + at, job.factor, width, job.out + at)

    return Kernel(kernel_table.RMS_NORM, JOB, prepare, block, nothing)
