"""The next token of each row: the largest logit, a draw, and masks that come while the program runs.

A draw follows a temperature, top-k, top-p, min-p and a seed, by rejection: the algorithm of
`rekindle._src.programs.sampling` with the same random words. In XLA that is 1,300 instructions of every step program: a
third of the time that loading one takes.

A mask has a bit for each token, the lowest bit of a word of 32 first; 1 allows the token. A grammar mostly allows a
few tokens or almost all. What a block of forbidden tokens adds to any sum is 0, so a draw from the gathered blocks
that keep a token gives the token that it gives with minus infinity everywhere else.

Axes: N rows, V vocabulary, B blocks of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rekindle_kernels.native import kernel_table
from rekindle_kernels.native.kernel_table import MASK_GATE
from rekindle_kernels.native.language.handler import Kernel, job_layout, nothing
from rekindle_kernels.native.language.jit import inline, jit
from rekindle_kernels.native.language.memory import (
    acquire,
    f32,
    free,
    give_way,
    i32,
    malloc,
    publish,
    set_f32,
    set_i32,
    sleep,
    this_thread,
)
from rekindle_kernels.native.language.records import dim, record_at, take
from rekindle_kernels.native.language.vector import (
    LANES,
    add,
    larger,
    largest,
    load_f32,
    splat,
    store,
    where_bits,
    where_negative,
)
from rekindle_kernels.native.language.vector_math import LOWEST, exp

ROUNDS = 64  # each round of rejection halves the candidates at least, on average
ZERO, ONE, INFINITY = np.float32(0), np.float32(1), np.float32(np.inf)
STEP = np.float32(2.0**-24)
MAGNITUDE, BITS_OF_INFINITY, WORD = 0x7FFFFFFF, 0x7F800000, 0xFFFFFFFF

# The index of the largest number of each row: XLA:CPU reads the rows twice, on one thread.

STRETCH = 16 * LANES  # numbers: their largest is found first, its place only in the stretch that has the row's largest

ARGMAX_JOB = job_layout("argmax", {"x": "[rows, width]", "out": "int32 [rows]", "width": ""})


@inline
def first_largest(x: int, width: int) -> int:
    """Return the first index of the largest of [width]; the last index where all are NaN."""
    top, start = -INFINITY, 0
    for begin in range(0, width // STRETCH * STRETCH, STRETCH):
        a = b = splat(-INFINITY)
        for at in range(begin, begin + STRETCH, 2 * LANES):
            a, b = larger(load_f32(x, at), a), larger(load_f32(x, at + LANES), b)
        here = largest(larger(a, b))
        if here > top:
            top, start = here, begin
    for at in range(width // STRETCH * STRETCH, width):
        if f32(x, at) > top:
            top, start = f32(x, at), at
    for at in range(start, width):
        if f32(x, at) == top:
            return at
    return width - 1


def argmax_kernel() -> Kernel:
    """Return the first index of the largest of every row of x."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        take(frame, job)
        job.width = dim(frame.x, 1)
        return dim(frame.x, 0)

    @jit
    def block(job: Any, index: int) -> None:
        x = job.x + index * job.width * 4
        set_i32(job.out, index, first_largest(x, job.width))

    return Kernel(kernel_table.ARGMAX, ARGMAX_JOB, prepare, block, nothing)


SAMPLE_JOB = job_layout(
    "sample",
    {
        "logits": "[rows, vocabulary]",
        "temperature": "[rows]",
        "top_k": "int32 [rows]",
        "top_p": "[rows]",
        "min_p": "[rows]",
        "seed": "uint32 [rows, 2]",
        "position": "int32 [rows]",
        "block_size": "tokens that the first uniform of a draw does not tell apart",
        "masks": "int32 [rows, words]; 0 for none",
        "words": "of a row's mask",
        "out": "int32 [rows]",
    },
    "vocabulary",
)


@inline
def mixed(x: int, y: int, rotation: int) -> int:
    return x ^ (((y << rotation) | (y >> (32 - rotation))) & WORD)


@inline
def threefry(first: int, second: int, x: int, y: int) -> tuple[int, int]:
    """Threefry-2x32 with 20 rounds of one counter."""
    third = first ^ second ^ 0x1BD11BDA
    x, y = (x + first) & WORD, (y + second) & WORD
    for block in range(5):
        even = block % 2 == 0
        x = (x + y) & WORD
        y = mixed(x, y, 13 if even else 17)
        x = (x + y) & WORD
        y = mixed(x, y, 15 if even else 29)
        x = (x + y) & WORD
        y = mixed(x, y, 26 if even else 16)
        x = (x + y) & WORD
        y = mixed(x, y, 6 if even else 24)
        here = second if block % 3 == 0 else third if block % 3 == 1 else first
        following = third if block % 3 == 0 else first if block % 3 == 1 else second
        x, y = (x + here) & WORD, (y + following + block + 1) & WORD
    return x, y


@inline
def kth_largest(values: int, count: int, k: int) -> float:
    """Return the k-th largest of `count` values <= 0, by bisection over the bits of their magnitudes: they sort like
    ints."""
    low, high = -1, BITS_OF_INFINITY  # fewer than k are <= low, at least k are <= high
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = 0
        for i in range(count):
            enough += 1 if i32(values, i) & MAGNITUDE <= middle else 0
        if enough >= k:
            high = middle
        else:
            low = middle
    for i in range(count):
        if i32(values, i) & MAGNITUDE == high:
            return f32(values, i)
    return -INFINITY


@inline
def weigh(logits: int, count: int, top: float, temperature: float, values: int, weights: int) -> None:
    """Logits less the largest, divided by the temperature, and their exponentials, up to the end of the last vector."""
    for i in range(count):
        set_f32(values, i, (f32(logits, i) - top) / temperature)
    for i in range(count, (count + LANES - 1) // LANES * LANES):
        set_f32(values, i, -INFINITY)
    for i in range(0, count, LANES):
        x = load_f32(values, i)
        # Below it `exp` stays above 0, and what has no weight must never be drawn.
        store(weights, i, where_negative(add(x, splat(-LOWEST)), splat(ZERO), exp(x)))


@inline
def keep_largest(values: int, weights: int, count: int, k: int) -> None:
    """Take the weight from all but the k largest values."""
    floor = kth_largest(values, count, k)
    for i in range(count):
        if not f32(values, i) >= floor:
            set_f32(weights, i, ZERO)


@inline
def mass_above(values: int, weights: int, count: int, level: float) -> float:
    """Return the sum of the weights of values above a level."""
    total = ZERO
    for i in range(count):
        total += f32(weights, i) if f32(values, i) > level else ZERO
    return total


@inline
def allowed(values: int, weights: int, i: int, level: float, least: float) -> float:
    """Return a weight, or 0 if its value is not above the level or it is less than the least."""
    weight = f32(weights, i)
    return weight if f32(values, i) > level and weight >= least else ZERO


@jit
def inverse_cdf(
    values: int, weights: int, sums: int, count: int, size: int, level: float, least: float, u: float, v: float
) -> int:
    """Return an index drawn with two uniforms, block first; -1 for none."""
    total, blocks = ZERO, (count + size - 1) // size
    for block in range(blocks):
        mass = ZERO
        for i in range(block * size, min(count, (block + 1) * size)):
            mass += allowed(values, weights, i, level, least)
        set_f32(sums, block, mass)
        total += mass
    here, so_far = -1, ZERO
    for block in range(blocks):
        so_far += f32(sums, block)
        if so_far > u * total and f32(sums, block) > ZERO:
            here = block
            break
    if here < 0:
        return -1
    mass, so_far = f32(sums, here), ZERO
    for i in range(here * size, min(count, (here + 1) * size)):
        weight = allowed(values, weights, i, level, least)
        so_far += weight
        if so_far > v * mass and weight > ZERO:
            return i
    return -1


@inline
def draw(job: Any, r: int, count: int, values: int, weights: int, sums: int, best: int) -> int:
    """Return an index of row r drawn by its weights within top-p and min-p; the best index if no draw is accepted."""
    size = job.block_size
    top_p, least = f32(job.top_p, r), f32(job.min_p, r)
    level = -INFINITY
    nucleus = top_p * mass_above(values, weights, count, level) if top_p < ONE else ZERO
    high, low = i32(job.seed, 2 * r) & WORD, i32(job.seed, 2 * r + 1) & WORD
    first, second = threefry(high, low, 0, i32(job.position, r) & WORD)
    for number in range(ROUNDS):
        u, v = threefry(first, second, 0, number)
        share, inner = np.float32(u >> 8) * STEP, np.float32(v >> 8) * STEP
        drawn = inverse_cdf(values, weights, sums, count, size, level, least, share, inner)
        if drawn >= 0:
            value = f32(values, drawn)
            if top_p >= ONE or mass_above(values, weights, count, value) < nucleus:
                return drawn
            level = value
    return best


@jit
def choose(job: Any, r: int, logits: int, count: int) -> int:
    """Return the index that row r takes of so many logits."""
    best, temperature, k = first_largest(logits, count), f32(job.temperature, r), i32(job.top_k, r)
    if not temperature > ZERO:
        return best
    padded = (count + LANES - 1) // LANES * LANES
    values = malloc(3 * padded * 4)
    weights, sums = values + padded * 4, values + 2 * padded * 4
    weigh(logits, count, f32(logits, best), temperature, values, weights)
    if k > 0 and k < job.vocabulary:
        keep_largest(values, weights, count, k)
    index = draw(job, r, count, values, weights, sums, best)
    free(values)
    return index


BITS = 32


@inline
def allows_all(mask: int, words: int) -> bool:
    """True if every bit is 1."""
    bits = -1
    for word in range(words):
        bits &= i32(mask, word)
    return bits == -1


@inline
def allows(mask: int, token: int) -> bool:
    """True if the bit of a token is 1."""
    return (i32(mask, token // BITS) >> (token % BITS)) & 1 != 0


@inline
def gather(logits: int, mask: int, vocabulary: int, size: int, values: int, blocks: int) -> int:
    """Gather the logits of blocks of `size` tokens with at least one allowed token; forbidden tokens become minus
    infinity.

    Returns their number. `blocks` gets the numbers of these blocks; the last block is filled up.
    """
    words, kept = (vocabulary + BITS - 1) // BITS, 0
    for block in range((vocabulary + size - 1) // size):
        begin, some = block * size, 0
        for word in range(begin // BITS, min(words, (begin + size) // BITS)):
            some |= i32(mask, word)
        if some == 0:
            continue
        set_i32(blocks, kept // size, block)
        for at in range(begin, begin + size, LANES):
            if at + LANES <= vocabulary:
                bits = i32(mask, at // BITS) >> (at % BITS)
                store(values, kept + at - begin, where_bits(bits, load_f32(logits, at), splat(-INFINITY)))
            else:
                for token in range(at, at + LANES):
                    set_f32(values, kept + token - begin, -INFINITY)
                    if token < vocabulary and allows(mask, token):
                        set_f32(values, kept + token - begin, f32(logits, token))
        kept += size
    return kept


@inline
def first_never(logits: int, mask: int, vocabulary: int) -> int:
    """Return the first token that is forbidden or has a logit of minus infinity, for rows with no other choice.

    If there is none, because all logits are NaN, return the last token.
    """
    for token in range(vocabulary):
        if not allows(mask, token) or f32(logits, token) == -INFINITY:
            return token
    return vocabulary - 1


@inline
def choose_allowed(job: Any, r: int, logits: int, mask: int) -> int:
    """Choose a token for row r among the tokens that its mask allows."""
    vocabulary, size = job.vocabulary, job.block_size
    most = (vocabulary + size - 1) // size
    values = malloc(most * (size + 1) * 4)
    blocks = values + most * size * 4
    count, token = gather(logits, mask, vocabulary, size, values, blocks), -1
    if count > 0:
        index = choose(job, r, values, count)
        if f32(values, index) > -INFINITY:
            token = i32(blocks, index // size) * size + index % size
    free(values)
    return token if token >= 0 else first_never(logits, mask, vocabulary)


def sample_kernel() -> Kernel:
    """Return a token for every row of logits."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        take(frame, job)
        job.block_size = frame.settings.block
        job.words = dim(frame.masks, 1) if frame.has_masks else 0
        job.vocabulary = dim(frame.logits, 1)
        return dim(frame.logits, 0)

    @jit
    def block(job: Any, r: int) -> None:
        logits, mask = job.logits + r * job.vocabulary * 4, job.masks + r * job.words * 4
        if job.masks == 0 or allows_all(mask, job.words):
            set_i32(job.out, r, choose(job, r, logits, job.vocabulary))
        else:
            set_i32(job.out, r, choose_allowed(job, r, logits, mask))

    return Kernel(kernel_table.SAMPLE, SAMPLE_JOB, prepare, block, nothing)


# Masks that the host writes while a program runs (`native.mask_gate`): wait for them, and hand them on.

SPINS, YIELDS = 200, 2000  # before another program may have the core, and before it is given up for a while
PAUSE = 50  # microseconds, of which the system makes about 100
MOST = 600_000  # pauses until it gives up: a minute
HALF = 0xFFFFFFFF
OPEN, MISSED, GATE_BYTES = MASK_GATE.offset("open"), MASK_GATE.offset("missed"), MASK_GATE.size

GATE_JOB = job_layout(
    "gate", {"masks": "int32 [numbers], the host's; 0 if they did not come", "out": "", "numbers": ""}
)
_gate = record_at(MASK_GATE)


@inline
def opens(gate: int) -> bool:
    """Wait until the gate is open; False if it is not opened."""
    tries = 0
    while acquire(gate + OPEN) == 0:
        if this_thread(0) == _gate(gate).opener or tries > YIELDS + MOST:
            return False
        tries += 1
        if tries > YIELDS:
            sleep(PAUSE)
        elif tries > SPINS:
            give_way(0)
    return True


def gate_kernel() -> Kernel:
    """Return the kernel that waits at a gate and copies its masks. No token may come if the gate stays closed."""

    @jit
    def prepare(frame: Any, job: Any, threads: int) -> int:
        at = frame.gate.data
        gate = (i32(at, 0) & HALF) | (i32(at, 1) << 32)
        job.out = frame.masks.data
        job.numbers = dim(frame.masks, 0) * dim(frame.masks, 1)
        job.masks = gate + GATE_BYTES
        if not opens(gate):
            publish(gate + MISSED, 1)
            job.masks = 0
        return 1

    @jit
    def block(job: Any, index: int) -> None:
        for number in range(job.numbers):
            set_i32(job.out, number, 0 if job.masks == 0 else i32(job.masks, number))

    return Kernel(kernel_table.GATE, GATE_JOB, prepare, block, nothing)
