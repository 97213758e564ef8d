"""What happens to a prompt's queries, keys and values before attention: rotation, and the way into their pages.

Both are moves with a little arithmetic. XLA:CPU decides for every element of a concatenation which part it comes from
and rounds to bfloat16 one by one: 0.5 and 0.25 ms a layer for 512 tokens of 12 heads of 64, a tenth of the whole step.

Axes: T tokens, A heads that are there, D head size, F frequencies, K kv heads, S page size.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rekindle_kernels.native.memory import f32, i32
from rekindle_kernels.native.target import (
    Kernel,
    dim,
    field,
    inline,
    jit,
    nothing,
    operand,
    result,
    result_dim,
    set_field,
)
from rekindle_kernels.native.vector import LANES, load_f32, multiply, multiply_add, splat, store, subtract, total

TOKENS = 16  # of a block
ZERO, ONE = np.float32(0), np.float32(1)


def split(name: str) -> Kernel:
    """`(qk [T, A, D], qkv [T, H + 2K, D], cos [T, F], sin [T, F], weights [H + K, D], eps [1]) -> q [T, H, D],
    k [T, K, D], v [T, K, D]`: q and k divided by their rms and multiplied by the weights, then rotated as by
    `rope.rotate`. qk may be qkv itself; weights [1, 1] are none."""
    QK, QKV, COS, SIN, WEIGHTS, EPS, OUT, T, A, D, F, H, K, NORMED = 0, 1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 14, 15

    @jit
    def prepare(frame: int, job: int, threads: int) -> int:
        for index in range(6):
            set_field(job, QK + index, operand(frame, index))
        set_field(job, NORMED, 1 if dim(frame, 4, 1) == dim(frame, 0, 2) else 0)
        for index in range(3):
            set_field(job, OUT + index, result(frame, index))
            set_field(job, T + index, dim(frame, 0, index))
        set_field(job, F, dim(frame, 2, 1))
        set_field(job, H, result_dim(frame, 0, 1))
        set_field(job, K, result_dim(frame, 1, 1))
        return (dim(frame, 0, 0) + TOKENS - 1) // TOKENS

    @inline
    def normed(job: int, x: int, weight: int, out: int) -> None:
        """One head of one token."""
        width, squares = field(job, D), splat(ZERO)
        for i in range(0, width, LANES):
            squares = multiply_add(load_f32(x, i), load_f32(x, i), squares)
        mean = total(squares) / np.float32(width)
        factor = splat(ONE / np.float32(math.sqrt(mean + f32(field(job, EPS), 0))))
        for i in range(0, width, LANES):
            store(out, i, multiply(multiply(load_f32(x, i), factor), load_f32(weight, i)))

    @inline
    def rotated(job: int, t: int, first: int, count: int, out: int) -> None:
        """The heads [first, first + count) of one token."""
        width, half = field(job, D), field(job, F)
        cos, sin = field(job, COS) + t * half * 4, field(job, SIN) + t * half * 4
        for head in range(count):
            x = field(job, QK) + (t * field(job, A) + first + head) * width * 4
            if field(job, NORMED) == 1:
                normed(job, x, field(job, WEIGHTS) + (first + head) * width * 4, out + head * width * 4)
                x = out + head * width * 4
            for i in range(0, half, LANES):
                a, b, c, s = load_f32(x, i), load_f32(x, half + i), load_f32(cos, i), load_f32(sin, i)
                store(out, head * width + i, subtract(multiply(a, c), multiply(b, s)))
                store(out, head * width + half + i, multiply_add(b, c, multiply(a, s)))
            for i in range(2 * half, width, LANES):
                store(out, head * width + i, load_f32(x, i))

    @jit
    def block(job: int, index: int) -> None:
        heads, kv_heads, width = field(job, H), field(job, K), field(job, D)
        for t in range(index * TOKENS, min(field(job, T), (index + 1) * TOKENS)):
            rotated(job, t, 0, heads, field(job, OUT) + t * heads * width * 4)
            rotated(job, t, heads, kv_heads, field(job, OUT + 1) + t * kv_heads * width * 4)
            values = field(job, QKV) + (t * (heads + 2 * kv_heads) + heads + kv_heads) * width * 4
            out = field(job, OUT + 2) + t * kv_heads * width * 4
            for i in range(0, kv_heads * width, LANES):
                store(out, i, load_f32(values, i))

    return Kernel(name, prepare, block, nothing)


def write(name: str, put: Any, size: int) -> Kernel:
    """`(pages [P, 2, K, S, D], k [T, K, D], v [T, K, D], page_ids [T], offsets [T]) -> pages`, in place."""
    PAGES, KEYS, VALUES, IDS, OFFSETS, OUT, T, K, S, D = range(10)

    @jit
    def prepare(frame: int, job: int, threads: int) -> int:
        for index in range(5):
            set_field(job, PAGES + index, operand(frame, index))
        set_field(job, OUT, result(frame, 0))
        set_field(job, T, dim(frame, 1, 0))
        for axis in range(3):
            set_field(job, K + axis, dim(frame, 0, axis + 2))
        return (dim(frame, 1, 0) + TOKENS - 1) // TOKENS

    @inline
    def one(job: int, source: int, number: int) -> None:
        out = field(job, OUT) + number * field(job, D) * size
        for i in range(0, field(job, D), LANES):
            put(out, i, load_f32(source, i))

    @jit
    def block(job: int, index: int) -> None:
        heads, page_size, width = field(job, K), field(job, S), field(job, D)
        for t in range(index * TOKENS, min(field(job, T), (index + 1) * TOKENS)):
            page, offset = i32(field(job, IDS), t), i32(field(job, OFFSETS), t)
            for k in range(heads):
                at = (t * heads + k) * width * 4
                one(job, field(job, KEYS) + at, (page * 2 * heads + k) * page_size + offset)
                one(job, field(job, VALUES) + at, ((page * 2 + 1) * heads + k) * page_size + offset)

    return Kernel(name, prepare, block, nothing)
