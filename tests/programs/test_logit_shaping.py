"""Bias, penalties and the min_tokens mask against plain numpy, through the device-resident state."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import plain_sampling
from rekindle._src.core.extension import Extensions
from rekindle._src.core.prompt_rows import PromptRows, RowSpan
from rekindle._src.core.records import Request, Row
from rekindle._src.core.sampling import Sampling
from rekindle._src.programs import sampling as device
from rekindle._src.programs.request_state import RequestState, abstract_state, admit, pack_admission, record

VOCAB, SLOTS, CONTEXT = 50, 3, 40
EMPTY = np.zeros(0, np.int32)


def garbage() -> RequestState:
    """A state in which every slot was used by somebody before."""
    rng = np.random.default_rng(0)
    shapes = jax.tree.leaves(abstract_state(SLOTS, VOCAB))
    leaves = [rng.integers(1, 9, leaf.shape).astype(leaf.dtype) for leaf in shapes]
    return RequestState(*map(jnp.asarray, leaves))


def row_of(slot: int, sampling: Sampling, prompt: list[int], outputs: list[int], ends: set[int]) -> Row:
    request = Request("r", np.array(prompt, np.int32), sampling, eos_ids=frozenset(ends))
    earlier = np.array(outputs, np.int32) if outputs else None
    return Row(request, 0, slot, 0, 1, EMPTY, EMPTY, True, True, len(outputs), earlier)


def shaping_of(sampling: Sampling, generated: int) -> device.Shaping:
    return device.Shaping(
        repetition=jnp.array([sampling.repetition_penalty], jnp.float32),
        presence=jnp.array([sampling.presence_penalty], jnp.float32),
        frequency=jnp.array([sampling.frequency_penalty], jnp.float32),
        biased=jnp.array([bool(sampling.logit_bias)]),
        barred=jnp.array([generated < sampling.min_tokens]),
    )


OPTIONS = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 0.8},
    {"frequency_penalty": -0.6},
    {"logit_bias": {0: 2.5, 49: -1.0}},
    {"logit_bias": {7: math.inf}},
    {"logit_bias": dict.fromkeys(range(49), -math.inf)},
    {"min_tokens": 30, "max_tokens": 40},
    {
        "logit_bias": {3: 4.0, 5: -4.0}, "repetition_penalty": 1.5, "presence_penalty": 0.5,
        "frequency_penalty": 0.3, "min_tokens": 30, "max_tokens": 40,
    },
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o))
@pytest.mark.parametrize("resumed", [False, True])
def test_shaping_equals_plain_numpy(options: dict, resumed: bool) -> None:
    sampling = Sampling(**options)
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((1, VOCAB)).astype(np.float32) * 3
    prompt, ends = rng.integers(0, VOCAB, 20).tolist(), {2, 9}
    output = [5, 5, 6] if resumed else []
    state = jax.jit(admit)(garbage(), *pack_admission(row_of(1, sampling, prompt, output, ends), CONTEXT))
    for token in (9, 9, 9, 44):  # sampled by steps
        state = record(state, jnp.array([1, SLOTS]), jnp.array([1, SLOTS]), jnp.array([token, token]))
        output = [*output, token]
    slots = jnp.array([1])
    shaping = shaping_of(sampling, len(output))
    found = device.shape(jnp.asarray(logits), shaping, state, slots, state.history[slots])
    expected = plain_sampling.shaped(logits[0], sampling, prompt, output, ends)
    np.testing.assert_allclose(np.asarray(found)[0], expected, rtol=1e-6, atol=1e-5)


def test_a_row_without_options_is_unchanged_to_the_bit_whatever_its_slot_holds() -> None:
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((2, VOCAB)).astype(np.float32))
    one = shaping_of(Sampling(), 0)
    both = jax.tree.map(lambda a: jnp.concatenate([a, a]), one)
    state, slots = garbage(), jnp.array([0, 2])
    shaped = device.shape(logits, both, state, slots, state.history[slots])
    assert np.array_equal(np.asarray(shaped), np.asarray(logits))


def test_admission_resets_one_slot_and_no_other() -> None:
    before = garbage()
    row = row_of(1, Sampling(logit_bias={4: 1.0}), [1, 1, 2], [], {3})
    after = admit(before, *pack_admission(row, CONTEXT))
    for old, new in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        assert np.array_equal(np.asarray(old)[[0, 2, 3]], np.asarray(new)[[0, 2, 3]])
    assert np.asarray(after.history)[1].tolist() == [0, 1, 1] + [0] * (VOCAB - 3)


def test_the_history_has_no_token_in_the_place_of_a_soft_prompts_rows() -> None:
    row = row_of(1, Sampling(repetition_penalty=1.5), [1, 0, 0, 2, 0], [0], {3})
    rows = PromptRows((RowSpan(1, 3, b""), RowSpan(4, 5, b"")), (), wordless=True)
    row = row._replace(request=dataclasses.replace(row.request, extensions=Extensions(rows)))
    after = admit(garbage(), *pack_admission(row, CONTEXT))
    assert np.asarray(after.history)[1].tolist() == [2, 1, 1] + [0] * (VOCAB - 3), "the output counts"


def test_infinite_biases_on_two_tokens_leave_numbers() -> None:
    sampling = Sampling(logit_bias={4: math.inf, 6: math.inf, 8: -math.inf})
    row = row_of(0, sampling, [1], [], set())
    state = admit(garbage(), *pack_admission(row, CONTEXT))
    slots = jnp.array([0])
    shaping = shaping_of(sampling, 0)
    shaped = np.asarray(device.shape(jnp.zeros((1, VOCAB)), shaping, state, slots, state.history[slots]))[0]
    assert not np.isnan(shaped - shaped.max()).any()
    assert set(np.flatnonzero(shaped == shaped.max())) == {4, 6}
