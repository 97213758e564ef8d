"""Sampling on the device: the next token of each row, by the flags that the host sends with a step.

Axes: N rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import rekindle_kernels
from rekindle._src.programs.flags import Flag
from rekindle_kernels import Choice, Wanted

NOT_FINITE = -1  # read by the host in place of the token of a row whose numbers are not finite
Choose = Callable[[Array, Array | None], Array]  # from logits [N, V] and masks [N, W] to tokens [N]
Take = Callable[[Array, Choose], Any]


def plainly(logits: Array, choose: Choose) -> Array:
    """Return tokens [N] of rows without masks."""
    return choose(logits, None)


def choose(
    logits: Array, choice: Choice, any_flags: Array, masks: Array | None = None, *, implementation: str | None = None
) -> Array:
    """Return tokens [N] for logits [N, V], among those that `masks` allow; rows with temperature 0 are greedy.

    `any_flags` is the union of the rows' flags.
    """
    options = Wanted(
        draws=any_flags & Flag.DRAWS != 0,
        top_k=any_flags & Flag.TOP_K != 0,
        large_k=any_flags & Flag.LARGE_K != 0,
        top_p=any_flags & Flag.TOP_P != 0,
    )
    return rekindle_kernels.draw(logits, choice, options, masks, implementation=implementation)


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
