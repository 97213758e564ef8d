"""Log-probabilities of the whole vocabulary, of the model's own distribution or of the one that a token was drawn from.

Axes: N rows, V vocabulary.

They are for requests that want more than `logprobs` can carry: many alternatives, tokens that were named, or the
distribution behind all options. Programs with them are compiled when a step first needs one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from rekindle._src.core.records import Request, StepPlan, TokenLogprobs
from rekindle._src.core.sampling import Sampling
from rekindle._src.programs.buckets import WHOLE
from rekindle._src.programs.feature import Feature, Fields, Read, StepInputs
from rekindle._src.programs.flags import Flag, branch
from rekindle_kernels import Choice

_INFINITY = 0x7F800000  # the bits of float32's


def model_logprobs(logits: Array) -> Array:
    """Return the log-probabilities [N, V] of the model's own distribution, in the arithmetic of `logprobs_of`."""
    largest = logits.max(axis=-1, keepdims=True)
    return logits - (jnp.log(jnp.exp(logits - largest).sum(axis=-1, keepdims=True)) + largest)


def sampled_logprobs(logits: Array, choice: Choice, tokens: Array, any_flags: Array | Flag) -> Array:
    """Return the log-probabilities [N, V] of the distribution that `tokens` [N] were drawn from; -inf is "never".

    `logits` are those behind all options that change them. Temperature, top-k, top-p and min-p follow here as a draw
    applies them: top-p counts the weights that top-k leaves, and min-p is relative to the likeliest token. A token on
    the border of the nucleus may fall to either side by rounding, and the one that was drawn counts as inside. In a
    greedy row the token has all of the probability.
    """
    drawing = choice.temperature > 0.0
    largest = logits.max(axis=-1, keepdims=True)
    shifted = (logits - largest) / jnp.where(drawing, choice.temperature, 1.0)[:, None]
    magnitudes = lax.bitcast_convert_type(jnp.abs(shifted), jnp.int32)  # of values <= 0, which sort like integers
    everything = jnp.full(tokens.shape, _INFINITY, jnp.int32)

    def top_k() -> Array:
        limited = (choice.top_k > 0) & (choice.top_k < logits.shape[-1])
        kth = _least(magnitudes, jnp.ones_like(shifted), choice.top_k.astype(jnp.float32))
        return jnp.where(limited, kth, everything)

    weights = jnp.exp(shifted)
    kth = branch(any_flags & Flag.TOP_K != 0, top_k, lambda: everything)
    weights = jnp.where(magnitudes <= kth[:, None], weights, 0.0)

    def top_p() -> Array:
        border = _least(magnitudes, weights, choice.top_p * weights.sum(axis=-1))
        return jnp.where(choice.top_p < 1.0, border, everything)

    border = branch(any_flags & Flag.TOP_P != 0, top_p, lambda: everything)
    support = (magnitudes <= border[:, None]) & (weights >= choice.min_p[:, None]) & (weights > 0.0)
    chosen = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == tokens[:, None]
    support = jnp.where(drawing[:, None], support | chosen, chosen)
    total = jnp.where(support, jnp.exp(shifted), 0.0).sum(axis=-1, keepdims=True)
    return jnp.where(support, shifted - jnp.log(total), -jnp.inf)


def _least(magnitudes: Array, weights: Array, target: Array) -> Array:
    """Return the least magnitude [N] up to which the weights [N, V] add up to `target` [N], by bisection."""

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # the weights up to low are too few, those up to high are enough
        middle = low + (high - low) // 2
        enough = jnp.where(magnitudes <= middle[:, None], weights, 0.0).sum(axis=-1) >= target
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    start = jnp.full(target.shape, -1, jnp.int32), jnp.full(target.shape, _INFINITY, jnp.int32)
    return lax.fori_loop(0, 31, halve, start)[1]


def is_whole(sampling: Sampling) -> bool:
    """True if a request's log-probabilities need the whole vocabulary."""
    return sampling.logprobs is not None and sampling.whole_logprobs


class Distribution(Feature):
    """The log-probabilities of the whole vocabulary: columns beside the token."""

    variant = WHOLE

    def __init__(self, vocab_size: int) -> None:
        self.width = vocab_size

    def flags(self, request: Request) -> int:
        return int(Flag.SAMPLED_LOGPROBS) if request.sampling.logprobs_of == "sampled" else 0

    def in_plan(self, plan: StepPlan) -> bool:
        return any(row.samples and is_whole(row.request.sampling) for row in plan.rows)

    def columns(self, logits: Array, tokens: Array, inputs: StepInputs, chosen_from: Callable[[], Array]) -> Array:
        with jax.named_scope("logprobs"):
            result = model_logprobs(logits)

            def sampled() -> Array:
                drawn = sampled_logprobs(chosen_from(), inputs.choice, tokens, inputs.any_flags)
                return jnp.where(inputs.flag(Flag.SAMPLED_LOGPROBS)[:, None], drawn, result)

            result = branch(inputs.any_flags & Flag.SAMPLED_LOGPROBS != 0, sampled, lambda: result)
            return lax.bitcast_convert_type(result, jnp.int32)

    def read(self, read: Read, fields: Fields) -> None:
        for row, token, place, own in zip(read.plan.rows, read.tokens, read.places, fields, strict=True):
            if token is not None and is_whole(row.request.sampling):
                own["logprobs"] = _entry(read.columns[place].view(np.float32), token, row.request.sampling)


def _entry(logprobs: NDArray[np.float32], token: int, sampling: Sampling) -> TokenLogprobs:
    """Return a token's entry from the log-probabilities of the whole vocabulary [V]."""
    count = min(sampling.logprobs or 0, len(logprobs))
    top: Any = np.empty(0, np.int64)
    if count:
        top = np.argpartition(-logprobs, count - 1)[:count]
        top = top[np.lexsort((top, -logprobs[top]))]  # of equal ones the first, as `top_k` has them
        top = top[np.isfinite(logprobs[top])]
    drawn = sampling.logprobs_of == "sampled"
    return TokenLogprobs(
        token,
        float(logprobs[token]),
        tuple(top.tolist()),
        tuple(logprobs[top].tolist()),
        tuple(logprobs[list(sampling.logprob_token_ids)].tolist()),
        np.packbits(np.isfinite(logprobs), bitorder="little").tobytes() if drawn else b"",
    )
