"""Activations of gates times ups, where they are not part of the product: the gates and ups of a row, or two arrays.

XLA:CPU computes them by a fusion between two native calls, which ends a chain. Into the fusion it takes what makes the
ups: all embeddings of layers, for each of Gemma 4's 35 layers.
"""

from __future__ import annotations

from typing import Any

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.language.handler import Kernel, job_layout, nothing
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.records import dim
from rekindle_kernels.native.language.vector import LANES, load_f32, multiply, store
from rekindle_kernels.native.language.vector_math import gelu_tanh, silu

NUMBERS = 2048  # of a block
GELU_TANH = kernel_table.ACTIVATIONS.index("gelu_tanh")

JOB = job_layout(
    "gatedrows",
    {
        "gates": "[rows, width]",
        "ups": "[rows, stride]",
        "out": "[rows, height]",
        "rows": "",
        "width": "",
        "stride": "",
        "height": "",
        "activation": "",
    },
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


def kernel() -> Kernel:
    """Return the kernel."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        height = dim(frame.out, 1)
        job.gates = frame.gates.data
        job.out = frame.out.data
        job.rows = dim(frame.out, 0)
        job.width = dim(frame.gates, 1)
        job.height = height
        job.activation = frame.settings.activation
        if frame.has_ups:
            job.ups = frame.ups.data
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

    return Kernel(kernel_table.GATED_ROWS, JOB, prepare, block, nothing)
