"""DRY: tokens that would continue a repetition lose logit, the more the longer it is.

Axes: N rows, V vocabulary, W latest tokens that a slot keeps, C classes of breakers, B sequences of a class.

A row's window has its latest tokens, the newest first. For each distance k, it shows for how many tokens the text
repeats its tokens k places before; the next token there would continue the repetition. llama.cpp finds these lengths by
the Z-algorithm, one token after the other. Here all distances are compared at once, a few tokens of the match a round,
until none matches or penalties grow no more.

A breaker is a text, and no match passes it. It is found as llama.cpp finds it: a token with the whole text, or a token
that ends with the text's beginning, followed by the tokens of its rest. `breakers.py` sorts the vocabulary into classes
of tokens that begin the same rests, so that a slot keeps four bits for each token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.core.samplers import MAX_MATCH

CLASSES = 15  # and 0 for tokens that begin no breaker
REST = 8  # tokens after the first one of a breaker
SEQUENCES = 4  # of a class
PER_WORD = 8  # tokens with a class in one integer
_AT_ONCE = 16  # tokens of a match that a round compares: a fifth of the time for the longest, no more for short ones
LARGEST_LOG = 88.7228391  # llama.cpp's logarithm of the largest float


class Breakers(NamedTuple):
    """The breakers of each row."""

    classes: Array  # int32 [N, ceil(V / PER_WORD)]
    rests: Array  # int32 [N, CLASSES, SEQUENCES, 1 + REST]: the number of tokens, -1 for none, and the tokens

    def of(self, tokens: Array) -> Array:
        """Return the classes of tokens [N, T]; 0 below 0."""
        words = jnp.take_along_axis(self.classes, jnp.maximum(tokens, 0) // PER_WORD, axis=1)
        return jnp.where(tokens < 0, 0, (words >> (4 * (tokens % PER_WORD))) & 15)


class Window(NamedTuple):
    """The latest tokens of each row."""

    tokens: Array  # int32 [N, W]: the newest first; -1 for one that isn't text, which equals no other
    length: Array  # int32 [N]: how many of them count


class Dry(NamedTuple):
    """The options of each row [N]."""

    multiplier: Array
    base: Array
    allowed: Array  # int32


def penalties(window: Window, breakers: Breakers, options: Dry, vocab_size: int) -> Array:
    """Return the penalty of each token, float32 [N, V]."""
    tokens, length = window
    rows, width = tokens.shape
    classes = breakers.of(tokens)
    limit = _limit(window, breakers, classes)
    capped = options.base > 1.000001
    most = jnp.where(capped, LARGEST_LOG / jnp.log(jnp.where(capped, options.base, 2.0)), jnp.float32(MAX_MATCH))
    longest = jnp.minimum(limit, options.allowed + most.astype(jnp.int32))
    counts = _matches(window, jnp.minimum(longest, MAX_MATCH))
    # The token before the one at distance k would continue the match. A breaker of one token goes free.
    single = (classes > 0) & _has_whole(breakers, classes)
    free = (jnp.roll(counts, -1, axis=1) < options.allowed[:, None]) | single
    distance = lax.iota(jnp.int32, width) + 1
    free |= tokens < 0
    free |= (distance >= length[:, None]) | (length <= options.allowed)[:, None] | (limit < options.allowed)[:, None]
    lengths = jnp.where(free, -1, jnp.roll(counts, -1, axis=1))
    places = lax.iota(jnp.int32, rows)[:, None]
    there = jnp.where(tokens < 0, vocab_size, tokens)  # beyond the vocabulary for what isn't text
    best = jnp.full((rows, vocab_size), -1, jnp.int32).at[places, there].max(lengths, mode="drop")
    best = best.at[places, there].get(mode="fill", fill_value=-1)  # of a token at all of its places: fewer powers
    exponent = jnp.minimum(best - options.allowed[:, None], jnp.where(capped, jnp.floor(most), MAX_MATCH)[:, None])
    penalty = options.multiplier[:, None] * jnp.power(options.base[:, None], exponent.astype(jnp.float32))
    penalty = jnp.where(best >= 0, penalty, 0.0)
    return jnp.zeros((rows, vocab_size), jnp.float32).at[places, there].set(penalty, mode="drop")


def _matches(window: Window, longest: Array) -> Array:
    """Return for each distance k [N, W] how many latest tokens equal those k places before, at most `longest` [N]."""
    tokens, length = window
    width = tokens.shape[1]
    padded = jnp.pad(tokens, ((0, 0), (0, width + _AT_ONCE)), constant_values=-1)
    latest = jnp.pad(jnp.where(tokens < 0, -2, tokens), ((0, 0), (0, _AT_ONCE)), constant_values=-2)
    distance = lax.iota(jnp.int32, width)
    ends = jnp.minimum(length[:, None] - distance, longest[:, None])

    def go_on(carry: tuple[Array, Array, Array]) -> Array:
        return jnp.any(carry[1])

    def compare(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        first, matching, counts = carry
        for place in (first + offset for offset in range(_AT_ONCE)):
            earlier = lax.dynamic_slice_in_dim(padded, place, width, axis=1)
            matching &= lax.dynamic_slice_in_dim(latest, place, 1, axis=1) == earlier
            counts += matching
        return first + _AT_ONCE, matching & (first + _AT_ONCE < ends), counts

    start = (distance > 0) & (ends > 0), jnp.zeros(tokens.shape, jnp.int32)
    counts = lax.while_loop(go_on, compare, (jnp.int32(0), *start))[2]
    return jnp.clip(counts, 0, jnp.maximum(ends, 0))


def _has_whole(breakers: Breakers, classes: Array) -> Array:
    """Return whether a token of each class [N, T] is a whole breaker."""
    whole = (breakers.rests[:, :, :, 0] == 0).any(axis=2)  # [N, C]
    return jnp.take_along_axis(whole, jnp.maximum(classes - 1, 0), axis=1)


def _limit(window: Window, breakers: Breakers, classes: Array) -> Array:
    """Return how many latest tokens [N] come after the latest breaker; all of the window without one."""
    tokens, length = window
    rows, width = tokens.shape
    places = lax.iota(jnp.int32, width)

    def of_whole() -> Array:
        return jnp.where(classes > 0, 0, -1)

    def of_rests() -> Array:
        """Return the length of the longest rest that follows each token [N, W]; -1 without one."""
        rests = breakers.rests[lax.iota(jnp.int32, rows)[:, None], jnp.maximum(classes - 1, 0)]  # [N, W, B, 1 + REST]
        size = rests[..., 0]
        matches = (classes > 0)[..., None] & (size >= 0) & (size <= places[:, None])
        before = jnp.pad(tokens, ((0, 0), (REST, 0)), constant_values=-1)
        for offset in range(REST):
            after = before[:, REST - 1 - offset : REST - 1 - offset + width]
            matches &= (offset >= size) | (rests[..., 1 + offset] == after[..., None])
        return jnp.where(matches, size, -1).max(axis=-1)

    rest = lax.cond(jnp.any(breakers.rests[..., 0] > 0), of_rests, of_whole)
    begins = (rest >= 0) & (places < length[:, None])
    first = jnp.where(begins, places, width).min(axis=-1)
    at = jnp.minimum(first, width - 1)
    after = first - jnp.take_along_axis(rest, at[:, None], axis=1)[:, 0]
    return jnp.where(first < width, after, length)
