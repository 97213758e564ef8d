"""Masks of guided rows: which tokens a grammar allows, as bits that the host fills for each step.

Axes: N rows, V vocabulary, W = ceil(V / 32) words of a mask. A row without a guide has all bits set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.programs.request_state import BIAS_LIMIT

NO_TOKEN = -2  # what the host reads in place of a token where mask and options together leave none

Choose = Callable[[Array], Array]  # from logits [N, V] to tokens [N]
Take = Callable[[Array, Choose], Any]


def plainly(logits: Array, choose: Choose) -> Array:
    """Tokens [N] of rows without guides."""
    return choose(logits)


def among(masks: Array) -> Take:
    """Tokens [N] that the masks [N, W] allow, and the logits that they were chosen with."""

    def take(logits: Array, choose: Choose) -> tuple[Array, Array]:
        allowed = masked(logits, masks)
        tokens = choose(allowed)
        return tokens, jnp.take_along_axis(allowed, tokens[:, None], axis=1)[:, 0]

    return take


def masked(logits: Array, masks: Array) -> Array:
    """The logits [N, V], minus infinity where the bit of a token is 0."""
    bits = (masks[:, :, None] >> lax.iota(jnp.int32, 32)) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(allowed != 0, logits, -jnp.inf)


def with_dead_ends(told: Array, masks: Array, values: Array) -> Array:
    """`told` [N] with NO_TOKEN in guided rows whose token was chosen with a logit that means "never".

    Where all logits are minus infinity some token is chosen all the same, and an infinite bias is a finite number.
    """
    guided = jnp.any(masks != -1, axis=1)
    dead = guided & (values < -BIAS_LIMIT / 2)
    return jnp.where(dead, NO_TOKEN, told)
