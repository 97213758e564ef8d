"""RMS norm in one call: XLA:CPU makes five of it, which for few rows are nothing but calls."""

from __future__ import annotations

import math

import numpy as np

from rekindle_kernels.native.memory import f32
from rekindle_kernels.native.target import Kernel, dim, field, jit, nothing, operand, result, set_field
from rekindle_kernels.native.vector import LANES, add, load_f32, multiply, multiply_add, splat, store, total

ROWS = 16  # of a block
ZERO, ONE = np.float32(0), np.float32(1)


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
        width, weight = field(job, E), field(job, WEIGHT)
        for t in range(index * ROWS, min(field(job, T), (index + 1) * ROWS)):
            x, out = field(job, X) + t * width * 4, field(job, OUT) + t * width * 4
            a = b = splat(ZERO)
            for e in range(0, width, 2 * LANES):
                y, z = load_f32(x, e), load_f32(x, e + LANES)
                a, b = multiply_add(y, y, a), multiply_add(z, z, b)
            mean = total(add(a, b)) / np.float32(width)
            factor = splat(ONE / np.float32(math.sqrt(mean + f32(field(job, EPS), 0))))
            for e in range(0, width, LANES):
                store(out, e, multiply(multiply(load_f32(x, e), factor), load_f32(weight, e)))

    return Kernel(name, prepare, block, nothing)
