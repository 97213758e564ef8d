"""The sequences of a step's tokens, for kernels of recurrent layers: whose tokens lie where, and whose state is which.

Rows that decode have a token each, then come the prompts' tokens. Kernels look at sequences that have tokens, which
`prepare` lists, so that the many empty rows of a large program cost nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import free, i32, malloc, set_f32, set_i32
from rekindle_kernels.native.language.records import dim
from rekindle_kernels.native.language.vector import LANES, splat, store

ZERO = np.float32(0)
FIELDS = {
    "active": "int32 [count, SEQUENCE], of the sequences that have tokens",
    "count": "",
}
HEADS = {  # of kernels whose work are the heads of the sequences
    **FIELDS,
    "projected": "[tokens, width]",
    "width": "",
    "step": "column of `projected`",
    "step_bias": "[heads]",
    "log_rate": "[heads]",
    "states": "[slots, heads, keys, values]",
    "heads": "",
    "keys": "the size of one",
    "values": "the size of one",
    "out": "[tokens, heads · values]",
}
SEQUENCE = 5  # first token, tokens, slots that are read and written, whether the state begins as zeros
FIRST, TOKENS, READ, WRITTEN, BEGINS = range(SEQUENCE)


@inline
def list_sequences(frame: Any, job: Any, tokens: int, slots: int) -> None:
    """Note the sequences that have some of the step's `tokens`; their memory is freed by the kernel."""
    decode_rows, prompts = frame.settings.decode_rows, min(i32(frame.prompts.data, 0), dim(frame.ends, 0) - 1)
    lens, ends, reads, writes = frame.lens.data, frame.ends.data, frame.reads.data, frame.writes.data
    sequences = dim(frame.lens, 0)
    active = malloc(4 * SEQUENCE * max(1, sequences))
    count = 0
    for sequence in range(sequences):
        first, own, length = sequence, 1, i32(lens, sequence)
        if sequence >= decode_rows:
            prompt = sequence - decode_rows
            first, own = tokens, 0
            if prompt < prompts:
                first = decode_rows + min(max(i32(ends, prompt), 0), tokens)
                own = decode_rows + i32(ends, prompt + 1) - first
        own = min(own, tokens - first)
        if length > 0 and own > 0:
            at = SEQUENCE * count
            set_i32(active, at + FIRST, first)
            set_i32(active, at + TOKENS, own)
            set_i32(active, at + READ, min(max(i32(reads, sequence), 0), slots - 1))
            set_i32(active, at + WRITTEN, min(max(i32(writes, sequence), 0), slots - 1))
            set_i32(active, at + BEGINS, 1 if length <= own else 0)
            count += 1
    job.active = active
    job.count = count


@inline
def clear_rows_without(frame: Any, out: int, tokens: int, width: int) -> None:
    """Write zeros to the results [tokens, width] of rows without a sequence: a NaN in one of them would spread."""
    rows, prompts = min(frame.settings.decode_rows, tokens), min(i32(frame.prompts.data, 0), dim(frame.ends, 0) - 1)
    for row in range(rows):
        if i32(frame.lens.data, row) <= 0:
            for at in range(row * width, (row + 1) * width):
                set_f32(out, at, ZERO)
    used = rows + min(max(i32(frame.ends.data, max(prompts, 0)), 0), tokens - rows)
    for at in range(used * width, tokens * width):
        set_f32(out, at, ZERO)


@inline
def list_heads(frame: Any, job: Any, tokens: int) -> int:
    """Note the sequences, and the parts of a job that are in HEADS. Return how many heads all sequences have."""
    job.projected = frame.projected.data
    job.width = dim(frame.projected, 1)
    job.step = frame.settings.step
    job.step_bias = frame.step_bias.data
    job.log_rate = frame.log_rate.data
    job.states = frame.after.data
    job.heads = dim(frame.states, 1)
    job.keys = dim(frame.states, 2)
    job.values = dim(frame.states, 3)
    job.out = frame.out.data
    list_sequences(frame, job, tokens, dim(frame.states, 0))
    clear_rows_without(frame, job.out, tokens, job.heads * job.values)
    return job.count * job.heads


@inline
def head_of(job: Any, index: int) -> tuple[int, int, int, int, int]:
    """Return the head with this index: its number, the first token and the number of tokens of its sequence, and the
    addresses of the state to read and of the state to write. Where a sequence begins, the state to write is filled
    with zeros, and is the one to read, too."""
    H, size = job.heads, job.keys * job.values
    entry, h = index // H * SEQUENCE, index % H
    state = job.states + (i32(job.active, entry + READ) * H + h) * size * 4
    target = job.states + (i32(job.active, entry + WRITTEN) * H + h) * size * 4
    if i32(job.active, entry + BEGINS) == 1:
        for at in range(0, size, LANES):
            store(target, at, splat(ZERO))
        state = target
    return h, i32(job.active, entry + FIRST), i32(job.active, entry + TOKENS), state, target


@jit
def free_sequences(job: Any) -> None:
    """Free the memory of `list_sequences`, at the end of a kernel."""
    free(job.active)
