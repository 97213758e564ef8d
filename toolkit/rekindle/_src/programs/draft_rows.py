"""Draft rows on the device, where their requests' earlier tokens are read: by penalties and logits processors.

Such a row sees the tokens before it as if they had been sampled: its request's history, and the drafts between. The
step that checks drafts counts the tokens of accepted ones, as the host will. Rows of other requests pay for neither.

Axes: N rows, V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.programs.request_state import RequestState
from rekindle._src.programs.row_option import RowFlag
from rekindle._src.programs.step_part import StepInputs, branch


def histories(state: RequestState, inputs: StepInputs) -> Array:
    """Return the history [N, V] of each row: its slot's, with the drafts up to its own; see `RequestState.history`."""
    places, tokens = draft_places(inputs), inputs.tokens[inputs.last]
    rows = lax.iota(jnp.int32, len(places))

    def with_drafts_before(back: Array, history: Array) -> Array:
        """Add the tokens of the rows `back` places before each, where those are drafts of the same chain."""
        return history.at[rows, jnp.roll(tokens, back)].add(jnp.where(places > back, 2, 0))

    history: Array = lax.fori_loop(0, places.max(), with_drafts_before, state.history[inputs.slots])
    return history


def recording(inputs: StepInputs, tokens: Array) -> Array:
    """Return a flag for each row [N] that is an accepted draft: its tokens, among `tokens` [N], count as sampled."""

    def accepted() -> Array:
        rows, places = lax.iota(jnp.int32, len(tokens)), draft_places(inputs)
        wrong = (places > 0) & (inputs.tokens[inputs.last] != jnp.roll(tokens, 1))
        last_wrong = lax.cummax(jnp.where(wrong, rows, -1))
        return (places > 0) & (last_wrong < rows - places)

    return branch(inputs.any_flags & RowFlag.DRAFT != 0, accepted, lambda: jnp.zeros(tokens.shape, bool))


def draft_places(inputs: StepInputs) -> Array:
    """Return the place [N] of each row in its chain of drafts, from 1 on; 0 of rows that are none."""
    rows = lax.iota(jnp.int32, inputs.flags.shape[0])
    drafts = inputs.flag(RowFlag.DRAFT)
    return jnp.where(drafts, rows - lax.cummax(jnp.where(drafts, 0, rows)), 0)
