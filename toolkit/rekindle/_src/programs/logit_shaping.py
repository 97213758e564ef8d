"""Logit shaping, before a token is chosen: logit bias, penalties over the history, the `min_tokens` mask.

Axes: N rows, V vocabulary, L slots.

Order and meaning are those of vLLM and transformers. The bias is added. The logit of a token in the prompt or output is
divided by the repetition penalty where it is positive, and multiplied where it is not. An output token loses the
frequency penalty times its count, and the presence penalty once. Below `min_tokens`, tokens that would end the request
are masked. Each part is exact where it is unused (divide by 1, add 0), so that rows with and without share one call.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from rekindle._src.programs.request_state import RequestState


class Shaping(NamedTuple):
    """The options of each row; every field has N entries."""

    repetition: Array  # float32; 1 is off
    presence: Array  # float32; 0 is off
    frequency: Array  # float32; 0 is off
    biased: Array  # bool: the request has a logit_bias, which is in its slot
    barred: Array  # bool: below min_tokens, so that end tokens are masked


def shape(logits: Array, shaping: Shaping, state: RequestState, slots: Array) -> Array:
    """Return shaped logits [N, V]. Row i reads history, bias and end ids of slot `slots[i]`."""
    rows = jnp.arange(logits.shape[0])[:, None]
    bias = jnp.where(shaping.biased[:, None], state.bias_values[slots], 0.0)
    logits = logits.at[rows, state.bias_ids[slots]].add(bias, mode="drop")

    history = state.history[slots]
    times = (history >> 1).astype(jnp.float32)
    repetition = shaping.repetition[:, None]
    repeated = jnp.where(logits > 0.0, logits / repetition, logits * repetition)
    logits = jnp.where(history > 0, repeated, logits)
    logits = logits - shaping.frequency[:, None] * times - shaping.presence[:, None] * (times > 0.0)

    ends = jnp.where(shaping.barred[:, None], state.end_ids[slots], logits.shape[-1])
    return logits.at[rows, ends].set(-jnp.inf, mode="drop")
