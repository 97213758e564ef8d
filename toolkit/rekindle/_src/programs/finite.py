"""Telling rows whose numbers are not finite: a broken weight or an overflow, which no sampled token would show.

Axes: N rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

NOT_FINITE = -1  # what the host reads in place of such a row's token


def marked(tokens: Array, hidden: Array, logits: Array) -> Array:
    """`tokens` [N] for the host, with `NOT_FINITE` where a row's hidden state [N, E] or logits [N, V] are not numbers.

    The final norm spreads a NaN or an infinity of any layer over the whole hidden state, so its sum shows it, and a
    broken row of the head shows in the logit that was chosen. A NaN among other logits makes the last token the one
    that is chosen, and only then all logits are read again: a step of numbers pays for [N, E] alone.
    """
    with jax.named_scope("finite"):
        last = logits.shape[-1] - 1
        own = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
        finite = jnp.isfinite(hidden.astype(jnp.float32).sum(axis=-1) + own)
        spoiled = lax.cond(
            jnp.any(tokens == last),
            lambda: jnp.isnan(logits.max(axis=-1)),
            lambda: jnp.zeros(tokens.shape, bool),
        )
        return jnp.where(finite & ~spoiled, tokens, NOT_FINITE)
