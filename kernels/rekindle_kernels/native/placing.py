"""What happens to a prompt's queries, keys and values before attention: rotation, and the way into their pages.

Both are moves with a little arithmetic. XLA:CPU decides for every element of a concatenation which part it comes from
and rounds to bfloat16 one by one: 0.5 and 0.25 ms a layer for 512 tokens of 12 heads of 64, a tenth of the whole step.

Axes: T tokens, A heads that are there, D head size, F frequencies, K kv heads, S page size.
"""

from __future__ import annotations

from typing import Any

from rekindle_kernels.native.memory import f32, i32, set_f32
from rekindle_kernels.native.target import Kernel, dim, field, inline, jit, nothing, operand, result, set_field
from rekindle_kernels.native.vector import LANES, load_f32, multiply, multiply_add, store, subtract

TOKENS = 16  # of a block


def rotate(name: str) -> Kernel:
    """`(x [T, A, D], cos [T, F], sin [T, F], [first, count]) -> [T, count, D]`, as `rope.rotate` of some heads."""
    X, COS, SIN, FIRST, COUNT, OUT, T, A, D, F = range(10)

    @jit
    def prepare(frame: int, job: int, threads: int) -> int:
        for index in range(3):
            set_field(job, X + index, operand(frame, index))
        set_field(job, FIRST, i32(operand(frame, 3), 0))
        set_field(job, COUNT, i32(operand(frame, 3), 1))
        set_field(job, OUT, result(frame, 0))
        for axis in range(3):
            set_field(job, T + axis, dim(frame, 0, axis))
        set_field(job, F, dim(frame, 1, 1))
        return (dim(frame, 0, 0) + TOKENS - 1) // TOKENS

    @jit
    def block(job: int, index: int) -> None:
        count, width, half = field(job, COUNT), field(job, D), field(job, F)
        for t in range(index * TOKENS, min(field(job, T), (index + 1) * TOKENS)):
            cos, sin = field(job, COS) + t * half * 4, field(job, SIN) + t * half * 4
            for head in range(count):
                x = field(job, X) + (t * field(job, A) + field(job, FIRST) + head) * width * 4
                out = field(job, OUT) + (t * count + head) * width * 4
                for i in range(0, half, LANES):
                    a, b, c, s = load_f32(x, i), load_f32(x, half + i), load_f32(cos, i), load_f32(sin, i)
                    store(out, i, subtract(multiply(a, c), multiply(b, s)))
                    store(out, half + i, multiply_add(b, c, multiply(a, s)))
                for i in range(2 * half, width):
                    set_f32(out, i, f32(x, i))

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
