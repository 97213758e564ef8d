"""Marking rows whose numbers are not finite: a broken weight or an overflow, which no sampled token would show.

Axes: N rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

NOT_FINITE = -1  # read by the host in place of such a row's token


def marked(tokens: Array, hidden: Array, logits: Array) -> Array:
    """Return `tokens` [N] with `NOT_FINITE` where a row's hidden state [N, E] or logits [N, V] are not numbers.

    The residual stream carries a NaN or an infinity of any layer to the hidden state, whose sum shows it. A broken row
    of the head shows in the logit that was chosen, or makes the last token the one that is chosen: only then all logits
    are read again. Other steps pay for [N, E] alone.
    """
    with jax.named_scope("finite"):
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
        finite = jnp.isfinite(hidden.astype(jnp.float32).sum(axis=-1) + chosen)
        finite &= lax.cond(
            jnp.any(tokens == logits.shape[-1] - 1),
            lambda: ~jnp.isnan(logits.max(axis=-1)),
            lambda: jnp.ones(tokens.shape, bool),
        )
        return jnp.where(finite, tokens, NOT_FINITE)
