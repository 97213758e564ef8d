"""Masks of guided rows: the tokens that a grammar allows, as bits that the host fills for each step.

Axes: N rows, V vocabulary, W = ceil(V / 32) words of a mask. A row without a guide has all bits set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.programs.request_state import BIAS_LIMIT

NO_TOKEN = -2  # read by the host in place of a token where mask and options together leave none

Choose = Callable[[Array, Array | None], Array]  # from logits [N, V] and masks [N, W] to tokens [N]
Take = Callable[[Array, Choose], Any]


def plainly(logits: Array, choose: Choose) -> Array:
    """Return tokens [N] of rows without guides."""
    return choose(logits, None)


def among(masks: Array) -> Take:
    """Return a function for tokens [N] that the masks [N, W] allow, and their logits; minus infinity is "never"."""

    def take(logits: Array, choose: Choose) -> tuple[Array, Array]:
        tokens = choose(logits, masks)
        words = jnp.take_along_axis(masks, tokens[:, None] >> 5, axis=1)[:, 0]
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
        return tokens, jnp.where((words >> (tokens & 31)) & 1 != 0, chosen, -jnp.inf)

    return take


def with_dead_ends(tokens: Array, masks: Array, values: Array) -> Array:
    """Return `tokens` [N] with NO_TOKEN in guided rows whose token was chosen with a logit that means "never".

    Where all logits are minus infinity a token is chosen nevertheless, and an infinite bias is a finite number.
    """
    never = values < -BIAS_LIMIT / 2
    dead = lax.cond(jnp.any(never), lambda: never & jnp.any(masks != -1, axis=1), lambda: never)
    return jnp.where(dead, NO_TOKEN, tokens)
