"""What changes a row's logits before it chooses: logit bias, penalties over its history, the `min_tokens` mask.

Axes: N rows, V vocabulary, L slots.

Order and meaning are vLLM's and transformers': the bias is added; a token of prompt or output has its logit divided by
the repetition penalty where positive, multiplied where not; each output token loses frequency × its count and once the
presence penalty; below `min_tokens` every token that would end the request is out. All of it is exact where unused
(divide by 1, add 0), so rows that use nothing may share the call with rows that do.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from rekindle._src.programs.request_state import RequestState


class Shaping(NamedTuple):
    """What is applied to each row; every field has N entries."""

    repetition: Array  # float32; 1 is off
    presence: Array  # float32; 0 is off
    frequency: Array  # float32; 0 is off
    biased: Array  # bool: the slot's bias belongs to this request
    barred: Array  # bool: may not end yet


def shape(logits: Array, shaping: Shaping, state: RequestState, slots: Array) -> Array:
    """Shaped logits [N, V]; `slots` [N] says whose history, bias and ends a row reads."""
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
