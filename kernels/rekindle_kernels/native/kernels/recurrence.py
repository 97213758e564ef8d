"""Layers with a state that each token changes: convolutions, delta rules, and Mamba-2's scan.

Rows that decode have a token each, then come the prompts' tokens. Kernels look at sequences that have tokens, which
`prepare` lists, so that the many empty rows of a large program cost nothing.

Rows of a chain are one sequence: each reads the state that the row before it writes, as drafts do. Their state passes
from token to token as that of a prompt, and is written to each row's own slot.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.language.handler import Kernel, job_layout
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import f32, free, i32, malloc, set_f32, set_i32
from rekindle_kernels.native.language.records import dim, take
from rekindle_kernels.native.language.vector import (
    LANES,
    add,
    largest,
    load_f32,
    multiply,
    multiply_add,
    splat,
    store,
    total,
)
from rekindle_kernels.native.language.vector_math import exp, exp_of_any, exp_of_one, sigmoid, silu, softplus

ZERO, ONE = np.float32(0), np.float32(1)
COLUMNS = 2 * LANES  # of a state at a time
FIELDS = {
    "active": "int32 [count, SEQUENCE], of the sequences that have tokens",
    "count": "of them",
    "writes": "int32 [sequences], the slots that are written",
    "slots": "how many there are",
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
# First token, tokens, slots that are read and written (the last one of a chain), whether the state begins as zeros,
# and whether the tokens are rows of a chain.
SEQUENCE = 6
FIRST, TOKENS, READ, WRITTEN, BEGINS, CHAINED = range(SEQUENCE)


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
            read = min(max(i32(reads, sequence), 0), slots - 1)
            written = min(max(i32(writes, sequence), 0), slots - 1)
            before = at - SEQUENCE
            follows = False
            if count > 0 and sequence < decode_rows:
                end = i32(active, before + FIRST) + i32(active, before + TOKENS)
                follows = end == sequence and i32(active, before + WRITTEN) == read
            if follows:
                set_i32(active, before + TOKENS, i32(active, before + TOKENS) + 1)
                set_i32(active, before + WRITTEN, written)
                set_i32(active, before + CHAINED, 1)
            else:
                set_i32(active, at + FIRST, first)
                set_i32(active, at + TOKENS, own)
                set_i32(active, at + READ, read)
                set_i32(active, at + WRITTEN, written)
                set_i32(active, at + BEGINS, 1 if length <= own else 0)
                set_i32(active, at + CHAINED, 0)
                count += 1
    job.active = active
    job.count = count
    job.slots = slots


@inline
def slot_of_row(job: Any, row: int) -> int:
    """Return the slot that a row of a chain writes."""
    return min(max(i32(job.writes, row), 0), job.slots - 1)


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
    take(frame, job)
    job.width = dim(frame.projected, 1)
    job.states = frame.after.data
    job.heads = dim(frame.states, 1)
    job.keys = dim(frame.states, 2)
    job.values = dim(frame.states, 3)
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


@inline
def is_chain(job: Any, index: int) -> bool:
    """True if the tokens of the head with this index are rows of a chain."""
    return i32(job.active, index // job.heads * SEQUENCE + CHAINED) == 1


@inline
def state_of_row(job: Any, row: int, h: int) -> int:
    """Return the address of a head's state that a row of a chain writes."""
    return job.states + (slot_of_row(job, row) * job.heads + h) * job.keys * job.values * 4


@jit
def free_sequences(job: Any) -> None:
    """Free the memory of `list_sequences`, at the end of a kernel."""
    free(job.active)


# A causal convolution of each channel over a few tokens, with the factors and the gate that models have around it.
#
# A block has a range of channels of all sequences, so that weights are turned once: they lie tap after tap for a
# channel. XLA makes a product and a sum of whole rows of every tap, and copies of what is gathered for them.

CHANNELS = 128  # of a block
INPUTS = 16  # tokens whose inputs are kept

CONVOLUTION_JOB = job_layout(
    "convolution",
    {
        **FIELDS,
        "x": "[tokens, width]",
        "weight": "[channels, taps]",
        "bias": "[channels], or 0",
        "tails": "[slots, taps - 1, channels]",
        "out": "[tokens, channels]",
        "first": "columns of x, as are the next two; -1 is none",
    },
    "width channels taps before behind silu",
)


@inline
def copy(source: int, target: int, count: int) -> None:
    """Copy whole vectors of float32."""
    for at in range(0, count, LANES):
        store(target, at, load_f32(source, at))


def convolution_kernel() -> Kernel:
    """Return the kernel of causal convolutions."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        take(frame, job)
        tokens = dim(frame.x, 0)
        job.width = dim(frame.x, 1)
        job.tails = frame.after.data
        job.channels = dim(frame.weight, 0)
        job.taps = dim(frame.weight, 1)
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
        """Sum the inputs of `count` tokens and of the tokens before them; the first input is at `inputs`."""
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
        weights = malloc((taps + back + INPUTS) * CHANNELS * 4)
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
            for begin in range(0, tokens, INPUTS):
                count = min(INPUTS, tokens - begin)
                take_inputs(job, first + begin, count, channel, size, inputs + back * CHANNELS * 4)
                convolve(job, first + begin, count, channel, size, weights, inputs)
                if i32(job.active, entry + CHAINED) == 1:
                    for token in range(count):
                        slot = slot_of_row(job, first + begin + token)
                        tail = job.tails + (slot * back * job.channels + channel) * 4
                        for i in range(back):
                            copy(inputs + (token + 1 + i) * CHANNELS * 4, tail + i * job.channels * 4, size)
                for i in range(back):
                    copy(inputs + (count + i) * CHANNELS * 4, inputs + i * CHANNELS * 4, size)
            tail = job.tails + (i32(job.active, entry + WRITTEN) * back * job.channels + channel) * 4
            for i in range(back):
                copy(inputs + i * CHANNELS * 4, tail + i * job.channels * 4, size)
        free(weights)

    return Kernel(kernel_table.CONVOLUTION, CONVOLUTION_JOB, prepare, block, free_sequences)


# Delta rules, a token after the other: S ← S·decay; S ← S + k ⊗ beta·(v - kᵀS); o = qᵀS. A head has one decay, or one
# for each channel of its keys.
#
# A state [D, V] of a head is read once and written once for each token. What a token needs of the decayed state before
# it, kᵀS·decay and qᵀS·decay, is summed while the token before writes it; the result follows of them: o = qᵀS·decay +
# (q·k)·change. Decays of channels multiply the key and the query of these sums. A few columns of a state at a time stay
# in the first level of cache, through up to CHUNK tokens. Prompts and rows that decode do the same arithmetic, so a
# state has the same bits however its text came.
#
# XLA's chunked form of a prompt is products of [64, 128] matrices, which is not less arithmetic than this where a key
# is as wide as 128; and its step of a row passes over the state five times. Milliseconds of a layer of Qwen3.5-0.8B
# (16 heads, 128 x 128) with its convolution, medians of eight turns on a busy Zen 4 with two cores:
#
#                    1 row   8 rows   prompt of 512
#     XLA, in loops   0.44     2.98     125
#     this            0.22     1.04      59

CHUNK = 64  # tokens whose keys and queries are kept
NORM_EPS = np.float32(1e-6)  # of the norms of q and k
NUMBERS = 4  # of a token in addition to its vectors: decay, weight of the correction, q·k, and one to fill up

_DELTA_FIELDS = {
    **HEADS,
    "qkv": "[tokens, channels]",
    "gate": "columns of `projected`, as is the next",
    "norm": "[values]",
}
DELTA_JOB = job_layout("delta", _DELTA_FIELDS, "channels beta key_heads", numbers={"eps": "of the norm"})
CHANNEL_DELTA_JOB = job_layout(
    "channel delta",
    {**_DELTA_FIELDS, "step": "the first of the steps' columns", "step_bias": "[heads · keys]"},
    "channels beta key_heads bounded",
    numbers={"eps": "of the norm", "bound": "the least logarithm of a decay, if they are bounded"},
)


@inline
def unit(x: int, size: int, factor: float, out: int) -> None:
    """Write x / |x| · factor."""
    sums = splat(ZERO)
    for d in range(0, size, LANES):
        y = load_f32(x, d)
        sums = multiply_add(y, y, sums)
    scale = splat(factor / np.float32(math.sqrt(total(sums) + NORM_EPS)))
    for d in range(0, size, LANES):
        store(out, d, multiply(load_f32(x, d), scale))


@inline
def prepare_key(job: Any, token: int, h: int, q: int, k: int, numbers: int) -> None:
    """Write a token's query and key, and the last two of its NUMBERS."""
    D, K = job.keys, job.key_heads
    qkv = job.qkv + token * job.channels * 4
    group = h // (job.heads // K)
    unit(qkv + group * D * 4, D, ONE / np.float32(math.sqrt(np.float32(D))), q)
    unit(qkv + (K + group) * D * 4, D, ONE, k)
    products = splat(ZERO)
    for d in range(0, D, LANES):
        products = multiply_add(load_f32(q, d), load_f32(k, d), products)
    row = job.projected + token * job.width * 4
    set_f32(numbers, 1, largest(sigmoid(splat(f32(row, job.beta + h)))))
    set_f32(numbers, 2, total(products))


@inline
def prepare_token(job: Any, token: int, h: int, vectors: int, numbers: int) -> None:
    """Write a token's query, its key, and its NUMBERS. Each vector is CHUNK keys after the one before it."""
    prepare_key(job, token, h, vectors, vectors + CHUNK * job.keys * 4, numbers)
    row = job.projected + token * job.width * 4
    rate = exp_of_any(f32(job.log_rate, h))
    steps = largest(softplus(splat(f32(row, job.step + h) + f32(job.step_bias, h))))
    set_f32(numbers, 0, exp_of_one(-rate * steps))


@inline
def prepare_channels(job: Any, token: int, h: int, vectors: int, numbers: int) -> None:
    """Write a token's query and key, both times the decays, its key, its decays, and NUMBERS with a decay of one."""
    D = job.keys
    apart = CHUNK * D * 4
    query, ahead, key, decays = vectors, vectors + apart, vectors + 2 * apart, vectors + 3 * apart
    prepare_key(job, token, h, query, key, numbers)
    set_f32(numbers, 0, ONE)
    steps = job.projected + (token * job.width + job.step + h * D) * 4
    bias = job.step_bias + h * D * 4
    rate = splat(exp_of_any(f32(job.log_rate, h)))
    for d in range(0, D, LANES):
        step = add(load_f32(steps, d), load_f32(bias, d))
        if job.bounded == 1:
            logarithm = multiply(splat(job.bound), sigmoid(multiply(rate, step)))
        else:
            logarithm = multiply(multiply(splat(-ONE), rate), softplus(step))
        decay = exp(logarithm)
        store(decays, d, decay)
        store(query, d, multiply(load_f32(query, d), decay))
        store(ahead, d, multiply(load_f32(key, d), decay))


def sweeper(updates: bool, looks: bool, of_channels: bool) -> Any:
    """Return a pass over COLUMNS columns of a state. With `updates`, S · decay + key ⊗ change is written to `target`;
    with `looks`, the sums over a column of S times the next token's key, `ahead`, and `query` are returned. A state
    is an address and the width of a row. Decays are those at `decays` where they are of channels."""

    @inline
    def sweep(
        state: Any,
        target: Any,
        keys: int,
        key: int,
        decay: float,
        decays: int,
        changes: Any,
        ahead: int,
        query: int,
    ) -> Any:
        a = b = c = d = splat(ZERO)
        factor, (left, right) = splat(decay), changes
        (source, step), (out, stride) = state, target
        for row in range(keys):
            s, t = load_f32(source, row * step), load_f32(source, row * step + LANES)
            if updates:
                by = splat(f32(key, row))
                own = splat(f32(decays, row)) if of_channels else factor
                s, t = multiply_add(by, left, multiply(s, own)), multiply_add(by, right, multiply(t, own))
                store(out, row * stride, s)
                store(out, row * stride + LANES, t)
            if looks:
                by, of = splat(f32(ahead, row)), splat(f32(query, row))
                a, b = multiply_add(by, s, a), multiply_add(by, t, b)
                c, d = multiply_add(of, s, c), multiply_add(of, t, d)
        return a, b, c, d

    return sweep


def delta_kernel() -> Kernel:
    """Return the kernel of the gated delta rule."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        job.channels = dim(frame.qkv, 1)
        return list_heads(frame, job, dim(frame.qkv, 0))

    block = _delta_block(prepare_token, silu, of_channels=False)
    return Kernel(kernel_table.GATED_DELTA, DELTA_JOB, prepare, block, free_sequences)


def channel_delta_kernel() -> Kernel:
    """Return the kernel of the delta rule with a decay for each channel."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        job.channels = dim(frame.qkv, 1)
        count = list_heads(frame, job, dim(frame.qkv, 0))
        job.key_heads = job.heads
        return count

    block = _delta_block(prepare_channels, sigmoid, of_channels=True)
    return Kernel(kernel_table.CHANNEL_DELTA, CHANNEL_DELTA_JOB, prepare, block, free_sequences)


def _delta_block(prepare_one: Any, activation: Any, *, of_channels: bool) -> Any:
    """Return the function of a block: a head of a sequence, with its tokens made ready by `prepare_one`.

    Results are normed and multiplied by the activation of their gates."""
    look, update, both = (sweeper(*passes, of_channels) for passes in ((False, True), (True, False), (True, True)))
    vectors = 4 if of_channels else 2  # of a token; the first is for the query of a sum, the next for its key
    last = vectors - 2 if of_channels else 1  # the key itself

    @jit
    def columns(
        job: Any, h: int, first: int, count: int, scratch: int, state: int, target: int, column: int, chained: bool
    ) -> None:
        """Take the tokens of a chunk through a few columns of a head's state."""
        D, V, channels, width = job.keys, job.values, job.channels, job.heads * job.values
        ahead, k = scratch + CHUNK * D * 4, scratch + last * CHUNK * D * 4
        decays, numbers = scratch + (last + 1) * CHUNK * D * 4, scratch + vectors * CHUNK * D * 4
        here = numbers + CHUNK * NUMBERS * 4, COLUMNS
        source, end = (state, V), (target, V)
        v = job.qkv + (first * channels + 2 * job.key_heads * D + h * V + column) * 4
        out = job.out + (first * width + h * V + column) * 4
        none = splat(ZERO), splat(ZERO)
        a, b, c, d = look(source, here, D, k, ZERO, decays, none, ahead, scratch)
        for token in range(count):
            decay, beta, overlap = f32(numbers, 0), f32(numbers, 1), f32(numbers, 2)
            less, weight = splat(-decay), splat(beta)
            left = multiply(weight, multiply_add(less, a, load_f32(v, 0)))
            right = multiply(weight, multiply_add(less, b, load_f32(v, LANES)))
            factor, again = splat(decay), splat(overlap)
            store(out, 0, multiply_add(again, left, multiply(factor, c)))
            store(out, LANES, multiply_add(again, right, multiply(factor, d)))
            if token + 1 < count:
                after = ahead + D * 4
                kept = (state_of_row(job, first + token, h) + column * 4, V) if chained else here
                query = scratch + (token + 1) * D * 4
                a, b, c, d = both(source, kept, D, k, decay, decays, (left, right), after, query)
                source = kept
            else:
                update(source, end, D, k, decay, decays, (left, right), ahead, scratch)
            ahead += D * 4
            k += D * 4
            decays += D * 4
            numbers += NUMBERS * 4
            v += channels * 4
            out += width * 4

    @jit
    def gate_row(job: Any, token: int, h: int) -> None:
        """Norm the results of a head and multiply them by their gates."""
        V = job.values
        out = job.out + (token * job.heads + h) * V * 4
        gates = job.projected + (token * job.width + job.gate + h * V) * 4
        squares = splat(ZERO)
        for at in range(0, V, LANES):
            y = load_f32(out, at)
            squares = multiply_add(y, y, squares)
        scale = splat(ONE / np.float32(math.sqrt(total(squares) / np.float32(V) + job.eps)))
        for at in range(0, V, LANES):
            normed = multiply(multiply(load_f32(out, at), scale), load_f32(job.norm, at))
            store(out, at, multiply(normed, activation(load_f32(gates, at))))

    @jit
    def block(job: Any, index: int) -> None:
        """One head of one sequence."""
        D, V = job.keys, job.values
        h, first, tokens, state, target = head_of(job, index)
        chained = is_chain(job, index)
        scratch = malloc((CHUNK * (vectors * D + NUMBERS) + COLUMNS * D) * 4)
        numbers = scratch + vectors * CHUNK * D * 4
        for begin in range(0, tokens, CHUNK):
            count = min(CHUNK, tokens - begin)
            for i in range(count):
                prepare_one(job, first + begin + i, h, scratch + i * D * 4, numbers + i * NUMBERS * 4)
            if chained:
                target = state_of_row(job, first + begin + count - 1, h)
            for column in range(0, V, COLUMNS):
                columns(job, h, first + begin, count, scratch, state + column * 4, target + column * 4, column, chained)
            for i in range(count):
                gate_row(job, first + begin + i, h)
            state = target
        free(scratch)

    return block


# Mamba-2's scan, a token after the other: S ← S·exp(decay·step) + step·b ⊗ x; y = cᵀS + skip·x.
#
# A state [D, V] of a head is read and written once for each token. A few columns of it at a time stay in the first
# level of cache through all tokens of a prompt. Prompts and rows that decode do the same arithmetic, so a state has
# the same bits however its text came.

SCAN_JOB = job_layout(
    "scan",
    {
        **HEADS,
        "channels": "[tokens, width of channels]: x of all heads, b and c of all groups",
        "stride": "the width of channels",
        "skip": "[heads]",
    },
    "groups",
)


@inline
def sweep_scan(state: Any, target: Any, keys: int, b: int, c: int, decay: float, left: Any, right: Any) -> Any:
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


def scan_kernel() -> Kernel:
    """Return the kernel of selective scans."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        job.stride = dim(frame.channels, 1)
        return list_heads(frame, job, dim(frame.channels, 0))

    @jit
    def columns(
        job: Any, h: int, first: int, tokens: int, state: int, target: int, column: int, scratch: int, chained: bool
    ) -> None:
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
            if chained:
                end = state_of_row(job, first + token, h) + column * 4, V
            decay, c = exp_of_one(-rate * step), b + job.groups * D * 4
            y, z = sweep_scan(source, end, D, b, c, decay, multiply(by, left), multiply(by, right))
            store(out, 0, multiply_add(skip, left, y))
            store(out, LANES, multiply_add(skip, right, z))
            source = end
            x += stride * 4
            b += stride * 4
            out += H * V * 4
            raw += job.width * 4

    @jit
    def block(job: Any, index: int) -> None:
        """One head of one sequence."""
        D, V = job.keys, job.values
        h, first, tokens, state, target = head_of(job, index)
        chained = is_chain(job, index)
        scratch = malloc(COLUMNS * D * 4)
        for column in range(0, V, COLUMNS):
            columns(job, h, first, tokens, state + column * 4, target + column * 4, column, scratch, chained)
        free(scratch)

    return Kernel(kernel_table.SELECTIVE_SCAN, SCAN_JOB, prepare, block, free_sequences)
