"""Draft rows whose requests read their earlier tokens see the drafts before them; accepted ones are counted."""

from __future__ import annotations

from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings

from rekindle._src.programs.draft_rows import histories, recording
from rekindle._src.programs.request_state import RequestState, abstract_state, record
from rekindle._src.programs.row_option import RowFlag

VOCAB, SLOTS, ROWS = 6, 3, 10


class Inputs(NamedTuple):
    """What the functions read of `StepInputs`."""

    slots: Any
    tokens: Any
    last: Any
    flags: Any
    any_flags: Any

    def flag(self, flag: int) -> Any:
        return (self.flags & flag) != 0


@jax.jit
def run(state: RequestState, inputs: Inputs, tokens: Any) -> tuple[Any, Any]:
    return histories(state, inputs), recording(inputs, tokens)  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(
    chains=st.lists(st.integers(0, 3), min_size=1, max_size=SLOTS),
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=2 * ROWS, max_size=2 * ROWS),
    right=st.integers(0, 3),
)
def test_histories_and_accepted_drafts_are_those_of_the_plain_loop(
    chains: list[int], tokens: list[int], right: int
) -> None:
    """`right` drafts of each chain are what the row before chose."""
    shapes = jax.tree.leaves(abstract_state(SLOTS, VOCAB))
    state = RequestState(*(jnp.zeros(leaf.shape, leaf.dtype) for leaf in shapes))
    history = np.arange((SLOTS + 1) * VOCAB, dtype=np.int32).reshape(SLOTS + 1, VOCAB)
    state = state._replace(history=jnp.asarray(history))
    slots, flags = [SLOTS] * ROWS, [0] * ROWS
    read, chosen = tokens[:ROWS], tokens[ROWS:]
    expected, counted, at = history[slots].copy(), [False] * ROWS, 0
    after = history.copy()
    for slot, drafts in enumerate(chains[: ROWS // 4 + 1]):
        own, valid = history[slot].copy(), True
        for place in range(min(drafts + 1, ROWS - at)):
            slots[at] = slot
            flags[at] = int(RowFlag.DRAFT) if place else int(RowFlag.SAMPLES)
            if place:
                if place <= right:
                    read[at] = chosen[at - 1]
                valid = valid and read[at] == chosen[at - 1]
                own[read[at]] += 2
                counted[at] = valid
            expected[at] = own
            if valid:
                after[slot, chosen[at]] += 2
            at += 1
    bits = np.array(flags, np.int32)
    inputs = Inputs(
        jnp.array(slots),
        jnp.array(read),
        jnp.arange(ROWS),
        jnp.asarray(bits),
        jnp.asarray(np.bitwise_or.reduce(bits)),
    )
    found, accepted = run(state, inputs, jnp.array(chosen))
    assert np.asarray(accepted).tolist() == counted
    assert np.asarray(found)[:at].tolist() == expected[:at].tolist()
    samples = inputs.flag(RowFlag.SAMPLES)
    new = record(
        state,
        jnp.where(samples, inputs.slots, SLOTS),
        jnp.where(samples | accepted, inputs.slots, SLOTS),
        jnp.array(chosen),
    )
    assert np.asarray(new.history)[:SLOTS].tolist() == after[:SLOTS].tolist()
