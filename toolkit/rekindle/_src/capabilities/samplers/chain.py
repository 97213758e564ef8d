"""The samplers of llama.cpp that take logits as they are: each as a pure function, and the chain of them for each row.

Axes: N rows, V vocabulary, K samplers of a chain.

Rows of one step have chains of their own. A round applies one sampler to all rows that have it next: the first in
llama.cpp's order. So rows with chains in that order share every sampler, and a step has no more rounds than it has
samplers; another order takes a round of its own where it differs. Nothing is sorted: thresholds are found by bisection
(see `programs.logprobs`), so tokens with equal logits stay or go together.

llama.cpp counts the candidates that a sampler leaves, among them those with a logit of minus infinity until a sampler
drops them. The dynamic temperature depends on this `size`, which rows carry along.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.programs.logprobs import least_magnitude, total_of

XTC_ROUND = 1 << 20  # of a row's random numbers: draws use the first ones


class SamplerKind(enum.IntEnum):
    """The samplers of a chain, in llama.cpp's order."""

    DRY = 0
    TOP_N_SIGMA = 1
    TOP_K = 2
    TYPICAL_P = 3
    TOP_P = 4
    MIN_P = 5
    XTC = 6
    TEMPERATURE = 7
    END = 8


LONGEST = int(SamplerKind.END)


class Numbers(NamedTuple):
    """The options of each row, float32 [N]; its chain reads some."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    typical_p: Array
    top_n_sigma: Array
    xtc_probability: Array
    xtc_threshold: Array
    dynatemp_range: Array
    dynatemp_exponent: Array
    dry_multiplier: Array
    dry_base: Array
    dry_allowed_length: Array
    dry_penalty_last_n: Array
    mirostat: Array  # 0 or 2
    mirostat_tau: Array
    mirostat_eta: Array
    adaptive_target: Array  # below 0: off
    adaptive_decay: Array


class Candidates(NamedTuple):
    """The tokens that are left."""

    logits: Array  # [N, V]: minus infinity for the others
    size: Array  # float32 [N]: how many llama.cpp would have


class Probabilities(NamedTuple):
    """The distribution of logits."""

    p: Array  # [N, V]
    surprise: Array  # [N, V]: -ln p; infinite where p is 0


class Context(NamedTuple):
    """Everything else that samplers read of the rows."""

    seeds: Array  # uint32 [N, 2]
    positions: Array  # int32 [N]
    penalties: Callable[[], Array]  # DRY's, [N, V]
    deterministic: bool  # sums are added in an order that does not depend on N


def probabilities(logits: Array, *, deterministic: bool) -> Probabilities:
    """Return the distribution of logits; all zeros for a row without a finite one."""
    largest = logits.max(axis=-1, keepdims=True)
    shifted = logits - jnp.where(jnp.isfinite(largest), largest, 0.0)
    weights = jnp.exp(shifted)
    total = jnp.maximum(total_of(weights, deterministic=deterministic), jnp.finfo(jnp.float32).tiny)
    return Probabilities(weights / total, jnp.log(total) - shifted)


def _bits(values: Array) -> Array:
    """Return integers that sort as values >= 0 do."""
    return lax.bitcast_convert_type(values, jnp.int32)


def _kept(logits: Array, keep: Array) -> Candidates:
    """Return the logits that are kept, and their number."""
    kept = jnp.where(keep, logits, -jnp.inf)
    return Candidates(kept, (kept > -jnp.inf).astype(jnp.float32).sum(axis=-1))


def top_n_sigma(logits: Array, sigmas: Array, *, deterministic: bool) -> Array:
    """Return logits [N, V] within so many standard deviations [N] of the largest."""
    finite = logits > -jnp.inf
    count = jnp.maximum(finite.astype(jnp.float32).sum(axis=-1, keepdims=True), 1.0)
    values = jnp.where(finite, logits, 0.0)
    mean = total_of(values, deterministic=deterministic) / count
    squares = jnp.where(finite, (values - mean) ** 2, 0.0)
    deviation = jnp.sqrt(total_of(squares, deterministic=deterministic) / count)
    return jnp.where(logits < logits.max(axis=-1, keepdims=True) - sigmas[:, None] * deviation, -jnp.inf, logits)


def _dry(candidates: Candidates, numbers: Numbers, context: Context) -> Candidates:
    return candidates._replace(logits=candidates.logits - context.penalties())


def _top_n_sigma(candidates: Candidates, numbers: Numbers, context: Context) -> Candidates:
    logits = top_n_sigma(candidates.logits, numbers.top_n_sigma, deterministic=context.deterministic)
    return candidates._replace(logits=logits)


def _top_k(candidates: Candidates, numbers: Numbers, context: Context) -> Candidates:
    logits, k = candidates.logits, numbers.top_k
    below = jnp.where(logits > -jnp.inf, logits.max(axis=-1, keepdims=True) - logits, jnp.inf)
    magnitudes = _bits(below)
    kth = least_magnitude(magnitudes, jnp.ones_like(logits), jnp.minimum(k, logits.shape[-1]))
    kept = jnp.where(magnitudes <= kth[:, None], logits, -jnp.inf)
    return Candidates(kept, jnp.minimum(candidates.size, k))


def _typical_p(candidates: Candidates, numbers: Numbers, context: Context) -> Candidates:
    logits = candidates.logits
    p, surprise = probabilities(logits, deterministic=context.deterministic)
    parts = jnp.where(p > 0.0, p * surprise, 0.0)
    expected = total_of(parts, deterministic=context.deterministic)
    distance = _bits(jnp.where(p > 0.0, jnp.abs(surprise - expected), jnp.inf))
    more = jnp.nextafter(numbers.typical_p, jnp.float32(2.0))  # llama.cpp stops once the sum is above typical_p
    border = least_magnitude(distance, p, more, deterministic=context.deterministic)
    return _kept(logits, distance <= border[:, None])


def _top_p(candidates: Candidates, numbers: Numbers, context: Context) -> Candidates:
    logits = candidates.logits
    p, surprise = probabilities(logits, deterministic=context.deterministic)
    magnitudes = _bits(jnp.maximum(surprise, 0.0))
    border = least_magnitude(magnitudes, p, numbers.top_p, deterministic=context.deterministic)
    return _kept(logits, magnitudes <= border[:, None])


def _min_p(candidates: Candidates, numbers: Numbers, context: Context) -> Candidates:
    logits = candidates.logits
    return _kept(logits, logits >= logits.max(axis=-1, keepdims=True) + jnp.log(numbers.min_p)[:, None])


def _xtc(candidates: Candidates, numbers: Numbers, context: Context) -> Candidates:
    logits = candidates.logits
    acts = chances(context.seeds, context.positions) <= numbers.xtc_probability
    p = probabilities(logits, deterministic=context.deterministic).p
    above = p >= numbers.xtc_threshold[:, None]
    least = jnp.where(above, p, jnp.inf).min(axis=-1, keepdims=True)
    out = above & (p > least) & acts[:, None]
    count = out.astype(jnp.float32).sum(axis=-1)
    return Candidates(jnp.where(out, -jnp.inf, logits), candidates.size - count)


def chances(seeds: Array, positions: Array) -> Array:
    """Return random numbers in [0, 1) of the rows: XTC acts up to its probability."""

    def chance(seed: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, position), XTC_ROUND)
        return jax.random.uniform(key, dtype=jnp.float32)

    drawn: Array = jax.vmap(chance)(seeds, positions)
    return drawn


def _temperature(candidates: Candidates, numbers: Numbers, context: Context) -> Candidates:
    logits, size = candidates
    p, surprise = probabilities(logits, deterministic=context.deterministic)
    parts = jnp.where(p > 0.0, p * surprise, 0.0)
    entropy = total_of(parts, deterministic=context.deterministic)[:, 0]
    share = entropy / jnp.log(jnp.maximum(size, 2.0))
    low = jnp.maximum(0.0, numbers.temperature - numbers.dynatemp_range)
    high = numbers.temperature + numbers.dynatemp_range
    moving = (numbers.dynatemp_range > 0.0) & (size > 1.0)
    dynamic = low + (high - low) * jnp.power(jnp.maximum(share, 0.0), numbers.dynatemp_exponent)
    # With one candidate llama.cpp leaves its logit as it is: the draw is the same.
    temperature = jnp.where(moving, dynamic, numbers.temperature)[:, None]
    largest = logits.max(axis=-1, keepdims=True)
    first = jnp.argmax(logits == largest, axis=-1)[:, None]
    chosen = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == first
    shifted = jnp.where(
        logits > -jnp.inf, (logits - largest) / jnp.where(temperature > 0.0, temperature, 1.0), -jnp.inf
    )
    return Candidates(jnp.where((temperature > 0.0) | chosen, shifted, -jnp.inf), size)


_SAMPLERS = (_dry, _top_n_sigma, _top_k, _typical_p, _top_p, _min_p, _xtc, _temperature)


def narrow(logits: Array, numbers: Numbers, chains: Array, context: Context) -> Array:
    """Return logits [N, V] after each row's chain, int32 [N, LONGEST + 1] of `SamplerKind`s, which ends with END."""

    def following(places: Array) -> Array:
        return jnp.take_along_axis(chains, places[:, None], axis=1)[:, 0]

    def unfinished(carry: tuple[Array, Candidates]) -> Array:
        return following(carry[0]).min() < SamplerKind.END

    def round_(carry: tuple[Array, Candidates]) -> tuple[Array, Candidates]:
        places, candidates = carry
        following_ = following(places)
        kind = following_.min()
        branches = [lambda sampler=sampler: sampler(candidates, numbers, context) for sampler in _SAMPLERS]
        after: Candidates = lax.switch(kind, branches)
        takes = following_ == kind
        candidates = Candidates(
            jnp.where(takes[:, None], after.logits, candidates.logits), jnp.where(takes, after.size, candidates.size)
        )
        return places + takes, candidates

    size = jnp.full(logits.shape[:1], float(logits.shape[1]), jnp.float32)
    start = jnp.zeros(logits.shape[:1], jnp.int32), Candidates(logits, size)
    _, candidates = lax.while_loop(unfinished, round_, start)
    return candidates.logits


# The last sampler of a chain may carry numbers from token to token: mirostat's limit of surprise; adaptive_p's sums of
# probabilities and of their weights.
CARRIED = 2


def carries(numbers: Numbers) -> Array:
    """Return whether each row [N] carries numbers from token to token."""
    return (numbers.mirostat > 0.0) | (numbers.adaptive_target >= 0.0)


def last(logits: Array, numbers: Numbers, carried: Array, *, deterministic: bool) -> Array:
    """Return logits [N, V] after mirostat or adaptive_p, by the numbers carried [N, CARRIED]."""
    p, surprise = probabilities(logits, deterministic=deterministic)
    bits = surprise * jnp.float32(1.0 / jnp.log(2.0))
    limit = jnp.maximum(carried[:, :1], bits.min(axis=-1, keepdims=True))  # one token is always left
    truncated = jnp.where(bits <= limit, logits, -jnp.inf)

    sums, weights = carried[:, 0], carried[:, 1]
    target = numbers.adaptive_target
    mean = jnp.where(weights > 0.0, sums / jnp.where(weights > 0.0, weights, 1.0), target)
    distance = jnp.abs(p - jnp.clip(2.0 * target - mean, 0.0, 1.0)[:, None]) / 0.3
    preferred = jnp.where(logits > -jnp.inf, 5.0 - 10.0 * distance * distance / (1.0 + distance), -jnp.inf)
    result = jnp.where((numbers.mirostat > 0.0)[:, None], truncated, preferred)
    return jnp.where(carries(numbers)[:, None], result, logits)


def carry_on(logits: Array, numbers: Numbers, carried: Array, tokens: Array, *, deterministic: bool) -> Array:
    """Return the numbers [N, CARRIED] after rows chose `tokens` [N], by the logits that `last` took."""

    def chance(of: Array) -> Array:
        p = probabilities(of, deterministic=deterministic).p
        return jnp.take_along_axis(p, tokens[:, None], axis=1)[:, 0]

    before = chance(logits)
    after = chance(last(logits, numbers, carried, deterministic=deterministic))
    surprise = -jnp.log2(jnp.maximum(after, jnp.finfo(jnp.float32).tiny))
    limit = carried[:, 0] - numbers.mirostat_eta * (surprise - numbers.mirostat_tau)
    decay = numbers.adaptive_decay
    sums, weights = before + decay * carried[:, 0], 1.0 + decay * carried[:, 1]
    mirostat = numbers.mirostat > 0.0
    new = jnp.stack([jnp.where(mirostat, limit, sums), jnp.where(mirostat, carried[:, 1], weights)], axis=1)
    return jnp.where(carries(numbers)[:, None], new, carried)
