"""Sampling on the device: greedy, or a draw with temperature, top-k, top-p and min-p.

Axes: N rows, V vocabulary, B blocks of the vocabulary.

The vocabulary is never sorted (XLA:CPU sorts [16, 49152] in 232 ms). A draw is an inverse-CDF look-up in two levels,
block then token, which needs two uniforms per row where Gumbel noise needs V. top-p is applied by rejection: draw,
accept the token if it is in the nucleus, else draw again among the more likely tokens. A rejected token is outside the
nucleus and all of the nucleus is above it, so the accepted token has exactly the distribution of the nucleus; the first
draw is accepted with probability top_p. top-k needs its threshold, because top-p counts the mass within it.

A row's draw depends on its seed, its position and its own logits alone: `fold_in(fold_in(key(seed), position), round)`.
Tokens with exactly the threshold's logit are kept, as vLLM and transformers do for top-k. Every kernel here is
compiled into every step program (16 ms each on CPU), hence few reductions and flags that come from the host. On CPU
`rekindle_kernels.native` does all of it in one call, where it is installed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.programs.flags import SMALL_TOP_K, Flag
from rekindle._src.programs.random import uniforms
from rekindle_kernels import native

MOST_ROUNDS = 64  # each round of rejection halves the candidates at least, on average; a row of NaN never ends


class Choice(NamedTuple):
    """The sampling options of each row; every field has N entries."""

    temperature: Array  # float32; 0 is greedy
    top_k: Array  # int32; 0 is off
    top_p: Array  # float32; 1 is off
    min_p: Array  # float32; 0 is off
    seed: Array  # uint32 [N, 2]: high and low word
    position: Array  # int32: index in the sequence of the token to choose


def block_size(vocab: int) -> int:
    """Tokens per block, about the square root of the vocabulary. Draws depend on it: another size, other tokens."""
    return 1 << max(5, round(math.log2(vocab) / 2))


def greedy(logits: Array, *, use_native: bool = False) -> Array:
    """The first index of the largest logit; `jnp.argmax` reduces pairs and is 8 times slower on CPU."""
    if use_native and native.chooses(logits):
        return native.largest_index(logits)
    return _first_equal(logits, logits.max(axis=-1, keepdims=True))


def nan_is_passed_over(logits: Array, *, use_native: bool = False) -> bool:
    """Whether a NaN among a row's logits leaves the choice among the others; else such a row gets its last token."""
    return use_native and native.chooses(logits)


def _first_equal(logits: Array, best: Array) -> Array:
    # In a row of NaN no logit equals the best one, so the last index is returned.
    return _smallest(logits == best, logits.shape[-1] - 1)


def _smallest(hit: Array, otherwise: int) -> Array:
    """The first index [N] where [N, n] is true, or `otherwise`.

    Indices are floats (exact below 2**24): XLA:CPU reduces integers in three more passes, each with a kernel to compile
    and a copy to write.
    """
    index = lax.broadcasted_iota(jnp.float32, hit.shape, 1)
    return jnp.where(hit, index, float(otherwise)).min(axis=-1).astype(jnp.int32)


def choose(logits: Array, choice: Choice, wanted: Array, *, use_native: bool = False) -> Array:
    """Tokens [N] for logits [N, V]; rows with temperature 0 are greedy. `wanted` is the union of the rows' flags."""
    if use_native and native.chooses(logits):
        return native.draw(logits, *choice, block_size(logits.shape[-1]))
    largest = logits.max(axis=-1, keepdims=True)
    best = _first_equal(logits, largest)
    with jax.named_scope("draw"):
        return lax.cond(wanted & Flag.DRAWS != 0, lambda: _draw(logits, largest, best, choice, wanted), lambda: best)


def _draw(logits: Array, largest: Array, best: Array, choice: Choice, wanted: Array) -> Array:
    rows, vocab = logits.shape
    drawing = choice.temperature > 0.0
    # The largest is subtracted first, so that a tiny temperature gives -inf, never NaN.
    shifted = (logits - largest) / jnp.where(drawing, choice.temperature, 1.0)[:, None]
    off = jnp.full((rows,), -jnp.inf, jnp.float32)
    floor = lax.cond(wanted & Flag.TOP_K != 0, lambda: _kth_largest(shifted, choice.top_k, wanted), lambda: off)
    size = block_size(vocab)
    shifted = jnp.pad(shifted, ((0, 0), (0, -vocab % size)), constant_values=-jnp.inf).reshape(rows, -1, size)
    weights = jnp.where(shifted >= floor[:, None, None], jnp.exp(shifted), 0.0)
    open_ended = ~drawing | (choice.top_p >= 1.0)
    filtered = wanted & Flag.TOP_P != 0

    def mass_above(level: Array) -> Array:
        return lax.cond(
            filtered,
            lambda: jnp.where(shifted > level[:, None, None], weights, 0.0).sum(axis=(1, 2)),
            lambda: jnp.zeros_like(level),
        )

    nucleus = choice.top_p * mass_above(off)

    def attempt(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        round_, token, level, done = carry
        # min_p is relative to the likeliest token, whose weight is 1. It comes after top-p, which counts all weights.
        allowed = (shifted > level[:, None, None]) & (weights >= choice.min_p[:, None, None])
        drawn = _inverse_cdf(jnp.where(allowed, weights, 0.0), *uniforms(choice.seed, choice.position, round_))
        value = jnp.take_along_axis(shifted.reshape(rows, -1), jnp.maximum(drawn, 0)[:, None], axis=1)[:, 0]
        inside = (drawn >= 0) & (open_ended | (mass_above(value) < nucleus))
        token = jnp.where(inside & ~done, drawn, token)
        return round_ + 1, token, jnp.where(drawn >= 0, value, level), done | inside

    start = (jnp.int32(0), best, off, ~drawing)
    return lax.while_loop(lambda carry: ~jnp.all(carry[3]) & (carry[0] < MOST_ROUNDS), attempt, start)[1]


def _inverse_cdf(weights: Array, first: Array, second: Array) -> Array:
    """Index [N] into the flattened [N, B, size] weights, drawn with the two uniforms of each row; -1 for none."""
    _, blocks, size = weights.shape
    block = _first_above(weights.sum(axis=-1), first)
    inner = jnp.take_along_axis(weights, jnp.minimum(block, blocks - 1)[:, None, None], axis=1)[:, 0]
    index = _first_above(inner, second)
    return jnp.where((block < blocks) & (index < size), block * size + index, -1)


def _first_above(weights: Array, uniform: Array) -> Array:
    """The first index of positive weight whose cumulative weight exceeds that share of the total; else the width."""
    width = weights.shape[-1]
    # A product with a triangular matrix: jnp.cumsum is an associative scan on CPU, which is slow to compile.
    triangle = lax.broadcasted_iota(jnp.int32, (width, width), 0) <= lax.broadcasted_iota(jnp.int32, (width, width), 1)
    total = jnp.dot(weights, triangle.astype(jnp.float32), precision="highest")
    # A rounded total may rise where the weight is 0.
    return _smallest((total > uniform[:, None] * total[:, -1:]) & (weights > 0.0), width)


def _kth_largest(values: Array, k: Array, wanted: Array) -> Array:
    """The k-th largest of each row of values <= 0, or -inf where k is 0 or beyond the row."""
    small = min(SMALL_TOP_K, values.shape[-1])
    top, _ = lax.top_k(values, small)
    found = jnp.take_along_axis(top, jnp.clip(k - 1, 0, small - 1)[:, None], axis=1)[:, 0]
    bisected = lax.cond(wanted & Flag.LARGE_K != 0, lambda: _bisect(values, k), lambda: found)
    found = jnp.where(k > small, bisected, found)
    return jnp.where((k > 0) & (k < values.shape[-1]), found, -jnp.inf)


def _bisect(values: Array, k: Array) -> Array:
    """The k-th largest of values <= 0, by bisection over the bits of their magnitudes, which sort like integers."""
    magnitudes = lax.bitcast_convert_type(jnp.abs(values), jnp.int32)
    low, high = jnp.full(k.shape, -1, jnp.int32), jnp.full(k.shape, 0x7F800000, jnp.int32)  # the bits of +inf

    def halve(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = carry  # fewer than k values are <= low, at least k are <= high
        middle = low + (high - low) // 2
        enough = (magnitudes <= middle[:, None]).astype(jnp.float32).sum(axis=-1) >= k.astype(jnp.float32)
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    _, high = lax.fori_loop(0, 31, halve, (low, high))
    return -lax.bitcast_convert_type(high, jnp.float32)
