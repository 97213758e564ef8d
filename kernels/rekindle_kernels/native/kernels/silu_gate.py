"""silu of the first half of each row times the other, where a product can't end in its gate: adapters come before."""

from __future__ import annotations

from typing import Any

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.language.handler import Kernel, job_layout, nothing
from rekindle_kernels.native.language.jit import jit
from rekindle_kernels.native.language.memory import f32, set_f32
from rekindle_kernels.native.language.records import dim
from rekindle_kernels.native.language.vector import LANES, largest, load_f32, multiply, splat, store
from rekindle_kernels.native.language.vector_math import silu

NUMBERS = 8 << 10  # results of a block, about

JOB = job_layout("silugate", {"x": "[rows, 2 width]", "out": "[rows, width]", "rows": "", "width": "", "each": "rows"})


def kernel() -> Kernel:
    """Return the kernel."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        job.x = frame.x.data
        job.out = frame.out.data
        job.rows = dim(frame.x, 0)
        job.width = min(dim(frame.out, 1), dim(frame.x, 1) // 2)
        job.each = max(1, NUMBERS // max(1, job.width))
        return (job.rows + job.each - 1) // job.each

    @jit
    def block(job: Any, index: int) -> None:
        width, each = job.width, job.each
        whole = width // LANES * LANES
        for row in range(index * each, min(job.rows, (index + 1) * each)):
            gates = job.x + row * 8 * width
            ups, out = gates + 4 * width, job.out + row * 4 * width
            for i in range(0, whole, LANES):
                store(out, i, multiply(silu(load_f32(gates, i)), load_f32(ups, i)))
            for i in range(whole, width):
                set_f32(out, i, largest(silu(splat(f32(gates, i)))) * f32(ups, i))

    return Kernel(kernel_table.SILU_GATE, JOB, prepare, block, nothing)
