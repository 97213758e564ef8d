"""Greedy choice and draws without sorting.

Axes: N rows, V vocabulary, B blocks of the vocabulary.

Nothing here sorts the vocabulary (XLA:CPU sorts [16, 49152] in 232 ms). A draw is an inverse-CDF look-up in two
levels, block then token, which needs two uniforms per row where Gumbel noise needs V. Each operation is compiled into
every step program (16 ms each on CPU): hence few reductions, and branches by the caller's `Wanted`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from rekindle_kernels.ops.registry import Implementation, anything
from rekindle_kernels.ops.sampling import SMALL_TOP_K, Choice, Wanted, block_size

MOST_ROUNDS = 64  # each round of rejection halves the candidates at least, on average; a row of NaN never ends


def masked(logits: Array, masks: Array | None) -> Array:
    """Return the logits [N, V], minus infinity where a token's bit in the masks [N, words] is 0."""
    if masks is None:
        return logits
    bits = (masks[:, :, None] >> lax.iota(jnp.int32, 32)) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(allowed != 0, logits, -jnp.inf)


def greedy(logits: Array, masks: Array | None = None) -> Array:
    """Implement `ops.sampling.greedy`. `jnp.argmax` reduces pairs and is 8 times slower on CPU."""
    logits = masked(logits, masks)
    return _first_equal(logits, logits.max(axis=-1, keepdims=True))


def _first_equal(logits: Array, best: Array) -> Array:
    # A row of NaN equals nothing.
    return _smallest(logits == best, logits.shape[-1] - 1)


def _smallest(hit: Array, otherwise: int) -> Array:
    """Return the first index [N] where [N, n] is true, or `otherwise`.

    Indices are floats (exact below 2**24): XLA:CPU reduces integers in three more passes, each a kernel to compile and
    a copy to write.
    """
    index = lax.broadcasted_iota(jnp.float32, hit.shape, 1)
    return jnp.where(hit, index, float(otherwise)).min(axis=-1).astype(jnp.int32)


def draw(logits: Array, choice: Choice, wanted: Wanted, masks: Array | None = None) -> Array:
    """Implement `ops.sampling.draw`."""
    logits = masked(logits, masks)
    largest = logits.max(axis=-1, keepdims=True)
    best = _first_equal(logits, largest)
    with jax.named_scope("draw"):
        return lax.cond(wanted.draws, lambda: _draw(logits, largest, best, choice, wanted), lambda: best)


def _draw(logits: Array, largest: Array, best: Array, choice: Choice, wanted: Wanted) -> Array:
    rows, vocab = logits.shape
    drawing = choice.temperature > 0.0
    # The largest is subtracted first, so that a tiny temperature gives -inf, never NaN.
    shifted = (logits - largest) / jnp.where(drawing, choice.temperature, 1.0)[:, None]
    off = jnp.full((rows,), -jnp.inf, jnp.float32)
    floor = lax.cond(wanted.top_k, lambda: _kth_largest(shifted, choice.top_k, wanted), lambda: off)
    size = block_size(vocab)
    shifted = jnp.pad(shifted, ((0, 0), (0, -vocab % size)), constant_values=-jnp.inf).reshape(rows, -1, size)
    weights = jnp.where(shifted >= floor[:, None, None], jnp.exp(shifted), 0.0)
    open_ended = ~drawing | (choice.top_p >= 1.0)
    filtered = wanted.top_p

    def mass_above(level: Array) -> Array:
        return lax.cond(
            filtered,
            lambda: jnp.where(shifted > level[:, None, None], weights, 0.0).sum(axis=(1, 2)),
            lambda: jnp.zeros_like(level),
        )

    nucleus = choice.top_p * mass_above(off)

    def attempt(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        round_, token, level, finished = carry
        # min_p is relative to the likeliest token, whose weight is 1. It comes after top-p, which counts all weights.
        allowed = (shifted > level[:, None, None]) & (weights >= choice.min_p[:, None, None])
        candidate = _inverse_cdf(jnp.where(allowed, weights, 0.0), *uniforms(choice.seed, choice.position, round_))
        value = jnp.take_along_axis(shifted.reshape(rows, -1), jnp.maximum(candidate, 0)[:, None], axis=1)[:, 0]
        inside = (candidate >= 0) & (open_ended | (mass_above(value) < nucleus))
        token = jnp.where(inside & ~finished, candidate, token)
        return round_ + 1, token, jnp.where(candidate >= 0, value, level), finished | inside

    start = (jnp.int32(0), best, off, ~drawing)
    return lax.while_loop(lambda carry: ~jnp.all(carry[3]) & (carry[0] < MOST_ROUNDS), attempt, start)[1]


def _inverse_cdf(weights: Array, first: Array, second: Array) -> Array:
    """Draw the index [N] into the flattened [N, B, size] weights with the two uniforms of each row; -1 for none."""
    _, blocks, size = weights.shape
    block = _first_above(weights.sum(axis=-1), first)
    inner = jnp.take_along_axis(weights, jnp.minimum(block, blocks - 1)[:, None, None], axis=1)[:, 0]
    index = _first_above(inner, second)
    return jnp.where((block < blocks) & (index < size), block * size + index, -1)


def _first_above(weights: Array, uniform: Array) -> Array:
    """Return the first index with weight where the cumulative share exceeds `uniform`, else the width."""
    width = weights.shape[-1]
    # A product with a triangle: jnp.cumsum is an associative scan on CPU, which takes longer to compile than to run.
    triangle = lax.broadcasted_iota(jnp.int32, (width, width), 0) <= lax.broadcasted_iota(jnp.int32, (width, width), 1)
    total = jnp.dot(weights, triangle.astype(jnp.float32), precision="highest")
    # By rounding, a total may rise where there is no weight.
    return _smallest((total > uniform[:, None] * total[:, -1:]) & (weights > 0.0), width)


def _kth_largest(values: Array, k: Array, wanted: Wanted) -> Array:
    """Return the k-th largest of each row of values <= 0, or -inf where k is 0 or beyond the row."""
    small = min(SMALL_TOP_K, values.shape[-1])
    top, _ = top_k(values, small)
    kth = jnp.take_along_axis(top, jnp.clip(k - 1, 0, small - 1)[:, None], axis=1)[:, 0]
    bisected = lax.cond(wanted.large_k, lambda: _bisect(values, k), lambda: kth)
    kth = jnp.where(k > small, bisected, kth)
    return jnp.where((k > 0) & (k < values.shape[-1]), kth, -jnp.inf)


def _bisect(values: Array, k: Array) -> Array:
    """Find the k-th largest of values <= 0 by bisection over the bits of their magnitudes, which sort like integers."""
    magnitudes = lax.bitcast_convert_type(jnp.abs(values), jnp.int32)
    low, high = jnp.full(k.shape, -1, jnp.int32), jnp.full(k.shape, 0x7F800000, jnp.int32)  # the bits of +inf

    def halve(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = carry  # fewer than k values are <= low, at least k are <= high
        middle = low + (high - low) // 2
        enough = (magnitudes <= middle[:, None]).astype(jnp.float32).sum(axis=-1) >= k.astype(jnp.float32)
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    _, high = lax.fori_loop(0, 31, halve, (low, high))
    return -lax.bitcast_convert_type(high, jnp.float32)


GREEDY = Implementation("xla", greedy, anything)
DRAW = Implementation("xla", draw, anything)


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


# The random numbers of a draw: jax.random's `fold_in(fold_in(key(seed), position), round)`, written out. Through
# jax.random the two hashes are 15 kernels to compile and run on CPU; written out they are one.
def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Hash by Threefry-2x32 with 20 rounds (Salmon et al., 2011), elementwise over uint32 arrays."""
    first, second = key
    schedule = (first, second, first ^ second ^ jnp.uint32(0x1BD11BDA))
    x, y = counter[0] + first, counter[1] + second
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x = x + schedule[(block + 1) % 3]
        y = y + schedule[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y


def uniforms(seed: Array, position: Array, round_: Array) -> tuple[Array, Array]:
    """Return two float32 [N] in [0, 1) for seeds [N, 2] (high and low word), positions [N] and a round of rejection."""
    zero = jnp.zeros_like(seed[:, 0])
    key = threefry((seed[:, 0], seed[:, 1]), (zero, position.astype(jnp.uint32)))
    words = threefry(key, (zero, zero + round_.astype(jnp.uint32)))
    first, second = ((word >> 8).astype(jnp.float32) * jnp.float32(2.0**-24) for word in words)
    return first, second


# The largest values of each row, without sorting the row. An element that is among the k best of its row lies in one
# of the k blocks with the best maxima: each better block holds an element that is better. So a row is folded to its
# block maxima until they are few, and each level hands k blocks down to the one below. One pass reads [N, V]; at most
# 64 · 32 values are sorted, by one kernel on a GPU, where sorting a row of 152k values takes 30 kernels, each of
# which reads and writes [N, V].
BLOCK = 32


def top_k(values: Array, k: int) -> tuple[Array, Array]:
    """Implement `ops.sampling.top_k` by XLA: a partial sort on CPU, an instruction on TPU, a whole sort on GPU."""
    largest, indices = lax.top_k(values, k)
    return largest, indices


def top_k_of_blocks(values: Array, k: int) -> tuple[Array, Array]:
    """Implement `ops.sampling.top_k` by blocks: the same numbers at the same places.

    Zeros of both signs are equal to a maximum and not to a sort: where a row has both, other zeros may be named.
    """
    width = values.shape[-1]
    if width <= 2 * k * BLOCK:
        return top_k(values, k)
    missing = -width % BLOCK
    padded = jnp.pad(values, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    maxima = padded.reshape(values.shape[0], -1, BLOCK).max(axis=-1)
    _, blocks = top_k_of_blocks(maxima, k)
    # In ascending order, so that of equal values the first in the row comes first.
    blocks = lax.sort(blocks, dimension=1)
    indices = (blocks[:, :, None] * BLOCK + lax.iota(jnp.int32, BLOCK)).reshape(values.shape[0], -1)
    candidates = jnp.take_along_axis(values, jnp.minimum(indices, width - 1), axis=1)
    candidates = jnp.where(indices < width, candidates, -jnp.inf)
    largest, places = top_k(candidates, k)
    return largest, jnp.take_along_axis(indices, places, axis=1)


TOP_K = Implementation("xla", top_k, anything)
BLOCKS = Implementation("blocks", top_k_of_blocks, anything)
