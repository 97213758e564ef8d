"""Mamba-2's scan, a token after the other: S ← S·exp(decay·step) + step·b ⊗ x; y = cᵀS + skip·x.

A state [D, V] of a head is read and written once for each token. A few columns of it at a time stay in the first level
of cache through all tokens of a prompt. Prompts and rows that decode do the same arithmetic, so a state has the same
bits however its text came.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.kernels.sequences import HEADS, free_sequences, head_of, list_heads
from rekindle_kernels.native.language.handler import Kernel, job_layout
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import f32, free, malloc
from rekindle_kernels.native.language.records import dim
from rekindle_kernels.native.language.vector import LANES, largest, load_f32, multiply, multiply_add, splat, store
from rekindle_kernels.native.language.vector_math import exp_of_any, exp_of_one, softplus

COLUMNS = 2 * LANES  # of a state at a time
ZERO = np.float32(0)

JOB = job_layout(
    "scan",
    {
        **HEADS,
        "channels": "[tokens, width of channels]: x of all heads, b and c of all groups",
        "stride": "the width of channels",
        "skip": "[heads]",
        "groups": "",
    },
)


@inline
def sweep(state: Any, target: Any, keys: int, b: int, c: int, decay: float, left: Any, right: Any) -> Any:
    """Write S · decay + b ⊗ (left, right), and return c times it; a state is an address and a row's width."""
    y = z = splat(ZERO)
    factor, (source, step), (out, stride) = splat(decay), state, target
    for row in range(keys):
        by, of = splat(f32(b, row)), splat(f32(c, row))
        s = multiply_add(by, left, multiply(load_f32(source, row * step), factor))
        t = multiply_add(by, right, multiply(load_f32(source, row * step + LANES), factor))
        store(out, row * stride, s)
        store(out, row * stride + LANES, t)
        y, z = multiply_add(of, s, y), multiply_add(of, t, z)
    return y, z


def kernel() -> Kernel:
    """Return the kernel."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        job.channels = frame.channels.data
        job.stride = dim(frame.channels, 1)
        job.skip = frame.skip.data
        job.groups = frame.settings.groups
        return list_heads(frame, job, dim(frame.channels, 0))

    @jit
    def columns(job: Any, h: int, first: int, tokens: int, state: int, target: int, column: int, scratch: int) -> None:
        """Take all tokens of a sequence through a few columns of a head's state."""
        H, D, V, stride = job.heads, job.keys, job.values, job.stride
        x = job.channels + (first * stride + h * V + column) * 4
        b = job.channels + (first * stride + H * V + h // (H // job.groups) * D) * 4
        out = job.out + (first * H * V + h * V + column) * 4
        raw = job.projected + (first * job.width + job.step + h) * 4
        rate, bias, skip = exp_of_any(f32(job.log_rate, h)), f32(job.step_bias, h), splat(f32(job.skip, h))
        source, here = (state, V), (scratch, COLUMNS)
        for token in range(tokens):
            step = largest(softplus(splat(f32(raw, 0) + bias)))
            by, left, right = splat(step), load_f32(x, 0), load_f32(x, LANES)
            end = here if token + 1 < tokens else (target, V)
            decay, c = exp_of_one(-rate * step), b + job.groups * D * 4
            y, z = sweep(source, end, D, b, c, decay, multiply(by, left), multiply(by, right))
            store(out, 0, multiply_add(skip, left, y))
            store(out, LANES, multiply_add(skip, right, z))
            source = here
            x += stride * 4
            b += stride * 4
            out += H * V * 4
            raw += job.width * 4

    @jit
    def block(job: Any, index: int) -> None:
        """One head of one sequence."""
        D, V = job.keys, job.values
        h, first, tokens, state, target = head_of(job, index)
        scratch = malloc(COLUMNS * D * 4)
        for column in range(0, V, COLUMNS):
            columns(job, h, first, tokens, state + column * 4, target + column * 4, column, scratch)
        free(scratch)

    return Kernel(kernel_table.SELECTIVE_SCAN, JOB, prepare, block, free_sequences)
