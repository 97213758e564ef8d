"""Choosing the next token of each row, on the device: greedy, or a draw through temperature, top-k, top-p and min-p.

Axes: N rows, V vocabulary, B blocks of `BLOCK` tokens.

Nothing here sorts the vocabulary (XLA:CPU sorts [16, 49152] in 232 ms). A draw is an inverse-CDF look-up in two
levels, block then token, which needs two uniforms per row where Gumbel noise needs V. top-p is applied by rejection:
draw, accept if the token is in the nucleus, else draw again among the tokens that are likelier still. A rejected token
is outside the nucleus and everything in the nucleus is above it, so the accepted token has exactly the nucleus'
distribution; the first draw is accepted with probability top_p. top-k needs its threshold, because top-p counts the
mass within it.

A row's draw depends on its seed, its position and its own logits alone: `fold_in(fold_in(key(seed), position), round)`.
Tokens with exactly the threshold's logit are kept, as vLLM and transformers do for top-k.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

BLOCK = 256
SMALL_TOP_K = 64  # lax.top_k of 64 costs 1.3 ms for [16, 49152]; a larger k is found by bisection


class Choice(NamedTuple):
    """How each row chooses; every field has N entries."""

    temperature: Array  # float32; 0 is greedy
    top_k: Array  # int32; 0 is off
    top_p: Array  # float32; 1 is off
    min_p: Array  # float32; 0 is off
    seed: Array  # uint32 [N, 2]: high and low half
    position: Array  # int32: index in the sequence of the token to choose


def greedy(logits: Array) -> Array:
    """The first index of the largest logit. `jnp.argmax` reduces pairs and is 8 times slower on CPU."""
    best = logits.max(axis=-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    first = jnp.where(logits == best, index, logits.shape[-1]).min(axis=-1)
    return jnp.minimum(first, logits.shape[-1] - 1)  # a row of NaN equals nothing


def choose(logits: Array, choice: Choice) -> Array:
    """Tokens [N] for logits [N, V]; rows with temperature 0 are greedy whatever else they ask for."""
    drawing = choice.temperature > 0.0
    best = greedy(logits)
    with jax.named_scope("draw"):
        return lax.cond(jnp.any(drawing), lambda: jnp.where(drawing, _draw(logits, choice), best), lambda: best)


def _draw(logits: Array, choice: Choice) -> Array:
    rows, vocab = logits.shape
    drawing = choice.temperature > 0.0
    temperature = jnp.where(drawing, choice.temperature, 1.0)
    # The largest is subtracted first, so that a tiny temperature gives -inf, never NaN.
    shifted = (logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None]
    top_k = jnp.where(drawing & (choice.top_k < vocab), choice.top_k, 0)
    floor = lax.cond(
        jnp.any(top_k > 0), lambda: _kth_largest(shifted, top_k), lambda: jnp.full((rows,), -jnp.inf, jnp.float32)
    )
    blocks = -(-vocab // BLOCK)
    shifted = jnp.pad(shifted, ((0, 0), (0, blocks * BLOCK - vocab)), constant_values=-jnp.inf)
    shifted = shifted.reshape(rows, blocks, BLOCK)
    weights = jnp.where(shifted >= floor[:, None, None], jnp.exp(shifted), 0.0)
    # min_p is relative to the likeliest token, whose weight is 1. It comes after top-p, which counts all of `weights`.
    allowed = jnp.where(weights >= choice.min_p[:, None, None], weights, 0.0)
    nucleus = choice.top_p * weights.sum(axis=(1, 2))
    open_ended = ~drawing | (choice.top_p >= 1.0)

    def attempt(round_: Array, bound: Array) -> tuple[Array, Array]:
        among = jnp.where(shifted > bound[:, None, None], allowed, 0.0)
        token = _inverse_cdf(among, _uniforms(choice.seed, choice.position, round_))
        level = jnp.take_along_axis(shifted.reshape(rows, -1), token[:, None], axis=1)[:, 0]
        return token, level

    def accepted(level: Array) -> Array:
        def inside() -> Array:
            above = jnp.where(shifted > level[:, None, None], weights, 0.0).sum(axis=(1, 2))
            return open_ended | (above < nucleus)

        return lax.cond(jnp.all(open_ended), lambda: open_ended, inside)

    def again(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        round_, token, level, done = carry
        new_token, new_level = attempt(round_, level)
        token, level = jnp.where(done, token, new_token), jnp.where(done, level, new_level)
        return round_ + 1, token, level, done | accepted(level)

    # Nothing lies below -inf, so the first round of the loop excludes nothing that has any weight.
    start = jnp.full((rows,), -jnp.inf, jnp.float32)
    nothing = jnp.zeros((rows,), jnp.int32)
    state = (jnp.int32(0), nothing, start, jnp.zeros((rows,), bool))
    return lax.while_loop(lambda carry: ~jnp.all(carry[3]), again, state)[1]


def _inverse_cdf(weights: Array, uniforms: Array) -> Array:
    """Index [N] into the flattened [N, B, BLOCK] weights, drawn with the two uniforms of each row."""
    block = _first_above(weights.sum(axis=-1), uniforms[:, 0])
    inner = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
    return block * BLOCK + _first_above(inner, uniforms[:, 1])


def _first_above(weights: Array, uniform: Array) -> Array:
    """The first index whose cumulated weight exceeds that share of the total; never one without weight."""
    width = weights.shape[-1]
    total = jnp.cumsum(weights, axis=-1)
    index = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    positive = weights > 0.0  # cumulated sums in another order may rise by rounding where there is no weight
    hit = (total > uniform[:, None] * total[:, -1:]) & positive
    first = jnp.where(hit, index, width).min(axis=-1)
    return jnp.where(first < width, first, jnp.where(positive, index, 0).max(axis=-1))


def _uniforms(seed: Array, position: Array, round_: Array) -> Array:
    """Two uniforms in [0, 1) per row."""

    def bits(seed: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, position), round_)
        return jax.random.bits(key, (2,), jnp.uint32)

    return (jax.vmap(bits)(seed, position) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def _kth_largest(values: Array, k: Array) -> Array:
    """The k-th largest of each row of values <= 0, or -inf where k is 0."""
    small = min(SMALL_TOP_K, values.shape[-1])
    top, _ = lax.top_k(values, small)
    found = jnp.take_along_axis(top, jnp.clip(k - 1, 0, small - 1)[:, None], axis=1)[:, 0]
    large = k > small
    found = lax.cond(jnp.any(large), lambda: jnp.where(large, _bisect(values, k), found), lambda: found)
    return jnp.where(k > 0, found, -jnp.inf)


def _bisect(values: Array, k: Array) -> Array:
    """The k-th largest of values <= 0, by bisection over the bits of their magnitudes, which sort like integers."""
    magnitudes = lax.bitcast_convert_type(jnp.abs(values), jnp.int32)
    last = jnp.int32(0x7F800000)  # +inf
    low, high = jnp.full(k.shape, -1, jnp.int32), jnp.full(k.shape, last)

    def halve(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = carry  # fewer than k values are <= low, at least k are <= high
        middle = low + (high - low) // 2
        enough = (magnitudes <= middle[:, None]).astype(jnp.int32).sum(axis=-1) >= k
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    _, high = lax.while_loop(lambda carry: jnp.any(carry[1] - carry[0] > 1), halve, (low, high))
    return -lax.bitcast_convert_type(high, jnp.float32)
