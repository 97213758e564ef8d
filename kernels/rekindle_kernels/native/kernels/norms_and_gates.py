"""Work on rows between products: RMS norms, and gates times ups.

A norm is a call by itself, of which XLA:CPU makes five, or lies on the way into a product.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.language.handler import Kernel, job_layout, nothing
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import f32
from rekindle_kernels.native.language.records import dim, take
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
from rekindle_kernels.native.language.vector_math import gelu_tanh, silu

ROWS = 16  # of a block
ZERO, ONE = np.float32(0), np.float32(1)

NORM_JOB = job_layout(
    "norm",
    {
        "x": "[rows, width]",
        "weight": "[width]",
        "residual": "[rows, width], or 0",
        "factor": "[1], or 0",
        "out": "[rows, width]",
    },
    "rows width",
    numbers={"eps": "added to the mean square"},
)


@inline
def normalise(x: int, weight: int, eps: float, width: int, out: int) -> None:
    """Normalise one row; `width` is a multiple of two vectors."""
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


def norm_kernel() -> Kernel:
    """x / rms(x) · weight for every row of x, plus the residual if there is one."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        take(frame, job)
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

    return Kernel(kernel_table.RMS_NORM, NORM_JOB, prepare, block, nothing)


# Activations of gates times ups, where they are not part of the product: the gates and ups of a row, or two arrays.
#
# XLA:CPU computes them by a fusion between two native calls, which ends a chain. Into the fusion it takes what makes
# the ups: all embeddings of layers, for each of Gemma 4's 35 layers.

NUMBERS = 2048  # of a block
GELU_TANH = kernel_table.ACTIVATIONS.index("gelu_tanh")

GATED_JOB = job_layout(
    "gatedrows",
    {"gates": "[rows, width]", "ups": "[rows, stride]", "out": "[rows, height]"},
    "rows width stride height activation",
)


@inline
def gated_row(gates: int, ups: int, out: int, count: int, activation: int) -> None:
    """Numbers of one row, a whole number of vectors."""
    if activation == GELU_TANH:
        for i in range(0, count, LANES):
            store(out, i, multiply(gelu_tanh(load_f32(gates, i)), load_f32(ups, i)))
    else:
        for i in range(0, count, LANES):
            store(out, i, multiply(silu(load_f32(gates, i)), load_f32(ups, i)))


@inline
def pieces(job: Any) -> int:
    """Return in how many pieces a row is cut."""
    return (job.height + NUMBERS - 1) // NUMBERS


@inline
def rows_of_block(job: Any) -> int:
    """Return of how many rows a block computes a piece."""
    return max(1, NUMBERS // job.height)


def gated_kernel() -> Kernel:
    """Return the kernel of a gated MLP's activation."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        take(frame, job)
        height = dim(frame.out, 1)
        job.rows = dim(frame.out, 0)
        job.width = dim(frame.gates, 1)
        job.height = height
        if frame.has_ups:
            job.stride = height
        else:
            job.ups = job.gates + height * 4
            job.stride = job.width
        return pieces(job) * ((job.rows + rows_of_block(job) - 1) // rows_of_block(job))

    @jit
    def block(job: Any, index: int) -> None:
        begin = index % pieces(job) * NUMBERS
        count, first = min(job.height - begin, NUMBERS), index // pieces(job) * rows_of_block(job)
        for row in range(first, min(job.rows, first + rows_of_block(job))):
            gates, ups = job.gates + (row * job.width + begin) * 4, job.ups + (row * job.stride + begin) * 4
            gated_row(gates, ups, job.out + (row * job.height + begin) * 4, count, job.activation)

    return Kernel(kernel_table.GATED_ROWS, GATED_JOB, prepare, block, nothing)
