"""RMS norm: as a call of its own, of which XLA:CPU makes five, or on the way into a product."""

from __future__ import annotations

import math

import numpy as np

from rekindle_kernels.native.memory import f32
from rekindle_kernels.native.target import Kernel, dim, field, inline, jit, nothing, operand, result, set_field
from rekindle_kernels.native.vector import LANES, add, load_f32, multiply, multiply_add, splat, store, total

ROWS = 16  # of a block
ZERO, ONE = np.float32(0), np.float32(1)


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


def kernel(name: str) -> Kernel:
    """`(x [T, E], weight [E], eps [1]) -> x / rms(x) · weight`, all float32."""
    X, WEIGHT, EPS, OUT, T, E = range(6)

    @jit
    def prepare(frame: int, job: int, threads: int) -> int:
        for index in range(3):
            set_field(job, X + index, operand(frame, index))
        set_field(job, OUT, result(frame, 0))
        set_field(job, T, dim(frame, 0, 0))
        set_field(job, E, dim(frame, 0, 1))
        return (dim(frame, 0, 0) + ROWS - 1) // ROWS

    @jit
    def block(job: int, index: int) -> None:
        width, eps = field(job, E), f32(field(job, EPS), 0)
        for t in range(index * ROWS, min(field(job, T), (index + 1) * ROWS)):
            row = t * width * 4
            normalise(field(job, X) + row, field(job, WEIGHT), eps, width, field(job, OUT) + row)

    return Kernel(name, prepare, block, nothing)
