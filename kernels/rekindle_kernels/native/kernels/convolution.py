"""A causal convolution of each channel over a few tokens, with the factors and the gate that models have around it.

A block has a range of channels of all sequences, so that weights are turned once: they lie tap after tap for a channel.
XLA makes a product and a sum of whole rows of every tap, and copies of what is gathered for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.kernels.sequences import (
    BEGINS,
    FIELDS,
    FIRST,
    READ,
    SEQUENCE,
    TOKENS,
    WRITTEN,
    clear_rows_without,
    free_sequences,
    list_sequences,
)
from rekindle_kernels.native.language.handler import Kernel, job_layout
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import f32, free, i32, malloc, set_f32
from rekindle_kernels.native.language.records import dim
from rekindle_kernels.native.language.vector import LANES, load_f32, multiply, multiply_add, splat, store
from rekindle_kernels.native.language.vector_math import silu

CHANNELS = 128  # of a block
CHUNK = 16  # tokens whose inputs are kept
ZERO = np.float32(0)

JOB = job_layout(
    "convolution",
    {
        **FIELDS,
        "x": "[tokens, width]",
        "width": "",
        "weight": "[channels, taps]",
        "bias": "[channels], or 0",
        "tails": "[slots, taps - 1, channels]",
        "channels": "",
        "taps": "",
        "out": "[tokens, channels]",
        "first": "columns of x, as are the next two; -1 is none",
        "before": "",
        "behind": "",
        "silu": "",
    },
)


@inline
def copy(source: int, target: int, count: int) -> None:
    """Copy whole vectors of float32."""
    for at in range(0, count, LANES):
        store(target, at, load_f32(source, at))


def kernel() -> Kernel:
    """Return the kernel."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        tokens = dim(frame.x, 0)
        job.x = frame.x.data
        job.width = dim(frame.x, 1)
        job.weight = frame.weight.data
        job.bias = frame.bias.data if frame.has_bias else 0
        job.tails = frame.after.data
        job.channels = dim(frame.weight, 0)
        job.taps = dim(frame.weight, 1)
        job.out = frame.out.data
        job.first = frame.settings.first
        job.before = frame.settings.before
        job.behind = frame.settings.behind
        job.silu = frame.settings.silu
        list_sequences(frame, job, tokens, dim(frame.tails, 0))
        clear_rows_without(frame, job.out, tokens, job.channels)
        return (job.channels + CHANNELS - 1) // CHANNELS

    @jit
    def take_inputs(job: Any, token: int, count: int, channel: int, size: int, target: int) -> None:
        """Copy the inputs of some tokens, times their factors; the rows of `target` have CHANNELS."""
        for i in range(count):
            row = job.x + ((token + i) * job.width + channel) * 4
            x, factor, out = row + job.first * 4, row + job.before * 4, target + i * CHANNELS * 4
            for at in range(0, size, LANES):
                y = load_f32(x, at)
                store(out, at, multiply(y, load_f32(factor, at)) if job.before >= 0 else y)

    @jit
    def convolve(job: Any, token: int, count: int, channel: int, size: int, weights: int, inputs: int) -> None:
        """Sum some tokens' inputs and those before them, of which the first is at `inputs`."""
        taps, activates, behind = job.taps, job.silu, job.behind
        for i in range(count):
            out = job.out + ((token + i) * job.channels + channel) * 4
            factor = job.x + ((token + i) * job.width + behind + channel) * 4
            for at in range(0, size, LANES):
                y = load_f32(job.bias, channel + at) if job.bias != 0 else splat(ZERO)
                for tap in range(taps):
                    y = multiply_add(
                        load_f32(inputs, (i + tap) * CHANNELS + at), load_f32(weights, tap * CHANNELS + at), y
                    )
                if activates == 1:
                    y = silu(y)
                if behind >= 0:
                    y = multiply(y, load_f32(factor, at))
                store(out, at, y)

    @jit
    def block(job: Any, index: int) -> None:
        """A range of channels."""
        channel, taps = index * CHANNELS, job.taps
        size, back = min(CHANNELS, job.channels - channel), taps - 1
        weights = malloc((taps + back + CHUNK) * CHANNELS * 4)
        inputs = weights + taps * CHANNELS * 4
        for at in range(size):
            for tap in range(taps):
                set_f32(weights, tap * CHANNELS + at, f32(job.weight, (channel + at) * taps + tap))
        for number in range(job.count):
            entry = number * SEQUENCE
            first, tokens = i32(job.active, entry + FIRST), i32(job.active, entry + TOKENS)
            begins = i32(job.active, entry + BEGINS) == 1
            tail = job.tails + (i32(job.active, entry + READ) * back * job.channels + channel) * 4
            for i in range(back):
                row = inputs + i * CHANNELS * 4
                for at in range(0, size, LANES):
                    store(row, at, splat(ZERO) if begins else load_f32(tail, i * job.channels + at))
            for begin in range(0, tokens, CHUNK):
                count = min(CHUNK, tokens - begin)
                take_inputs(job, first + begin, count, channel, size, inputs + back * CHANNELS * 4)
                convolve(job, first + begin, count, channel, size, weights, inputs)
                for i in range(back):
                    copy(inputs + (count + i) * CHANNELS * 4, inputs + i * CHANNELS * 4, size)
            tail = job.tails + (i32(job.active, entry + WRITTEN) * back * job.channels + channel) * 4
            for i in range(back):
                copy(inputs + i * CHANNELS * 4, tail + i * job.channels * 4, size)
        free(weights)

    return Kernel(kernel_table.CONVOLUTION, JOB, prepare, block, free_sequences)
