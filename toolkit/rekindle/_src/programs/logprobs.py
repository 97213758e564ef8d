"""Log-probabilities of the model's own distribution: log-softmax of the raw logits, before any option changes them.

Axes: N rows or positions, V vocabulary, T prefill tokens.

This is vLLM's default mode: the distribution of the model, not the one that was sampled from.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.core.sampling import MAX_LOGPROBS
from rekindle._src.programs.flags import Flag, branch
from rekindle_kernels import top_k

WIDTH = 1 + 2 * MAX_LOGPROBS  # the token's own log-probability, the most likely ids, and theirs
CHUNK = 32  # positions whose logits exist at once, [32, V]; those of a whole chunk, 512 x 49152, would be 100 MB


def logprobs_of(logits: Array, tokens: Array) -> Array:
    """Return packed int32 [N, WIDTH]. Floats are stored as their bits, so that one transfer carries everything."""
    largest = logits.max(axis=-1, keepdims=True)
    normaliser = jnp.log(jnp.exp(logits - largest).sum(axis=-1, keepdims=True)) + largest
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1) - normaliser
    count = min(MAX_LOGPROBS, logits.shape[-1])
    top, ids = top_k(logits, count)
    missing = ((0, 0), (0, MAX_LOGPROBS - count))
    top, ids = jnp.pad(top - normaliser, missing, constant_values=-jnp.inf), jnp.pad(ids, missing)
    bits = lax.bitcast_convert_type(jnp.concatenate([chosen, top], axis=1), jnp.int32)
    return jnp.concatenate([bits[:, :1], ids, bits[:, 1:]], axis=1)


def row_logprobs(features: Array | Flag, logits: Array, tokens: Array) -> Array:
    """Return `logprobs_of`, or zeros if no row of the step needs log-probabilities."""
    with jax.named_scope("logprobs"):
        return branch(
            features & Flag.LOGPROBS != 0,
            lambda: logprobs_of(logits, tokens),
            lambda: jnp.zeros((logits.shape[0], WIDTH), jnp.int32),
        )


def prompt_logprobs(
    features: Array | Flag, hidden: Array, targets: Array, to_logits: Callable[[Array], Array]
) -> Array:
    """Return packed [T, WIDTH]: the log-probability of each target after its position; targets below 0 are skipped.

    `hidden` holds the states of all rows, the T prefill tokens last: slicing them out beforehand would copy them in
    every step. The token at position p is predicted by the hidden state at p - 1, so the first token of a chunk is the
    target of the chunk before: the host passes targets that reach one token past the chunk.
    """
    T = targets.shape[0]
    if not T:
        return jnp.zeros((0, WIDTH), jnp.int32)
    other_rows = hidden.shape[0] - T
    size = min(CHUNK, T)
    chunks = -(-T // size)

    def one(index: Array, packed: Array) -> Array:
        start = jnp.minimum(index * size, T - size)  # the last chunk may overlap the one before
        tokens = lax.dynamic_slice_in_dim(targets, start, size)

        def compute() -> Array:
            logits = to_logits(lax.dynamic_slice_in_dim(hidden, other_rows + start, size))
            return lax.dynamic_update_slice_in_dim(packed, logprobs_of(logits, jnp.maximum(tokens, 0)), start, 0)

        return lax.cond(jnp.any(tokens >= 0), compute, lambda: packed)

    with jax.named_scope("prompt_logprobs"):
        empty = jnp.zeros((T, WIDTH), jnp.int32)
        return branch(features & Flag.PROMPT_LOGPROBS != 0, lambda: lax.fori_loop(0, chunks, one, empty), lambda: empty)
