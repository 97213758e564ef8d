"""Recurrent layers against a loop over single tokens, however a prompt is cut and whatever runs beside it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from rekindle_kernels.ops.recurrence import RaggedBatch, causal_convolution, gated_delta, selective_scan

HEADS, KEY, VALUE, GROUPS, CHANNELS, TAPS = 4, 8, 12, 2, 10, 4
Array = NDArray[Any]
Tokens = dict[str, Any]


def tokens(count: int, seed: int) -> Tokens:
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((count, HEADS, KEY)).astype(np.float32)
    return {
        "q": rng.standard_normal((count, HEADS, KEY)).astype(np.float32),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.standard_normal((count, HEADS, VALUE)).astype(np.float32),
        "decay": -rng.gamma(1.0, 0.3, (count, HEADS)).astype(np.float32),
        "beta": rng.uniform(0, 1, (count, HEADS)).astype(np.float32),
        "b": rng.standard_normal((count, GROUPS, KEY)).astype(np.float32),
        "c": rng.standard_normal((count, GROUPS, KEY)).astype(np.float32),
        "step": rng.gamma(1.0, 0.5, (count, HEADS)).astype(np.float32),
        "x": rng.standard_normal((count, CHANNELS)).astype(np.float32),
    }


WEIGHT = np.random.default_rng(99).standard_normal((CHANNELS, TAPS)).astype(np.float32)
BIAS = np.random.default_rng(98).standard_normal(CHANNELS).astype(np.float32)
RATES = -np.random.default_rng(97).uniform(0.1, 2.0, HEADS).astype(np.float32)


def delta(t: Tokens, states: Any, batch: RaggedBatch, **options: Any) -> Any:
    return gated_delta(t["q"], t["k"], t["v"], t["decay"], t["beta"], states, batch, **options)


def scan(t: Tokens, states: Any, batch: RaggedBatch, **options: Any) -> Any:
    return selective_scan(t["v"], t["step"], jnp.asarray(RATES), t["b"], t["c"], states, batch, **options)


def convolve(t: Tokens, states: Any, batch: RaggedBatch, **options: Any) -> Any:
    return causal_convolution(t["x"], jnp.asarray(WEIGHT), jnp.asarray(BIAS), states, batch, **options)


def one_delta(t: Tokens, i: int, state: Array) -> tuple[Array, Array]:
    state = state * np.exp(t["decay"][i])[:, None, None]
    change = t["beta"][i][:, None] * (t["v"][i] - np.einsum("hd,hdv->hv", t["k"][i], state))
    state = state + t["k"][i][..., None] * change[:, None]
    return np.einsum("hd,hdv->hv", t["q"][i], state), state


def one_scan(t: Tokens, i: int, state: Array) -> tuple[Array, Array]:
    b, c = (np.repeat(t[name][i], HEADS // GROUPS, axis=0) for name in "bc")
    state = state * np.exp(RATES * t["step"][i])[:, None, None]
    state = state + b[..., None] * (t["v"][i] * t["step"][i][:, None])[:, None]
    return np.einsum("hd,hdv->hv", c, state), state


def one_convolution(t: Tokens, i: int, state: Array) -> tuple[Array, Array]:
    inputs = np.concatenate([state, t["x"][i][None]])
    return np.sum(inputs * WEIGHT.T, axis=0) + BIAS, inputs[1:]


MATRIX, TAIL = (HEADS, KEY, VALUE), (TAPS - 1, CHANNELS)
LAYERS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "gated_delta": (delta, one_delta, MATRIX),
    "selective_scan": (scan, one_scan, MATRIX),
    "convolution": (convolve, one_convolution, TAIL),
}


def expected(one: Callable[..., tuple[Array, Array]], t: Tokens, state: Array) -> tuple[Array, Array]:
    results = []
    for i in range(len(t["q"])):
        result, state = one(t, i, state)
        results.append(result)
    return np.stack(results), state


def batch_of(decodes: list[int], prefills: list[tuple[int, int]], *, rows: int = 0, most: int = 0) -> RaggedBatch:
    """Make a batch of decode rows (lengths before the step, -1: none) and prefills (start, tokens), up to `most`."""
    lengths = [before + 1 for before in decodes] + [start + count for start, count in prefills]
    ends = np.concatenate([[0], np.cumsum([count for _, count in prefills])]).tolist()
    spare = most - len(prefills) if most else 0
    return RaggedBatch(
        jnp.asarray(lengths + [0] * spare, jnp.int32),
        jnp.asarray(ends + [ends[-1]] * spare, jnp.int32),
        jnp.asarray(len(prefills), jnp.int32),
        len(decodes),
    )


@pytest.mark.parametrize("implementation", ["rows", "xla"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_batch_of_decode_rows_and_prefills_is_what_single_tokens_give(name: str, implementation: str) -> None:
    run, one, shape = LAYERS[name]
    decodes, prefills = [7, -1, 200], [(0, 3), (64, 130), (65, 1), (100, 90), (0, 200)]
    batch = batch_of(decodes, prefills, most=7)
    count = len(decodes) + sum(n for _, n in prefills)
    t = tokens(count + 9, seed=1)  # nine of padding
    states = np.random.default_rng(2).standard_normal((len(batch.lengths), *shape)).astype(np.float32)
    run = partial(run, implementation=implementation)
    out, after = jax.jit(run)(t, jnp.asarray(states), batch)
    assert np.isfinite(np.asarray(out)[:count]).all()
    spans = [(0, 1), (1, 2), (2, 3)]
    spans += [(3 + int(a), 3 + int(b)) for a, b in zip(batch.cu_lengths[:-1], batch.cu_lengths[1:], strict=True)]
    starts = [*decodes, *(start for start, _ in prefills)]
    for row, start in enumerate(starts):
        first, last = spans[row]
        if start < 0:
            np.testing.assert_array_equal(after[row], states[row])  # an empty row keeps its state
            continue
        begin = np.zeros(shape, np.float32) if start == 0 else states[row]
        result, state = expected(one, {k: v[first:last] for k, v in t.items()}, begin)
        np.testing.assert_allclose(out[first:last], result, rtol=5e-6, atol=3e-5)
        np.testing.assert_allclose(after[row], state, rtol=5e-6, atol=3e-5)
    for row in range(len(starts), len(batch.lengths)):
        np.testing.assert_array_equal(after[row], states[row])
    _check_slots(run, t, states, batch, out, after)


def _check_slots(run: Any, t: Tokens, states: Array, batch: RaggedBatch, out: Any, after: Any) -> None:
    """Check the same step over an array of slots; some sequences read another slot than they write, as after a hit."""
    used = np.asarray(batch.lengths) > 0
    reads = np.where(used, [9, 0, 3, 12, 5, 1, 7, 0, 0, 0], 0).astype(np.int32)
    writes = np.where(used, [9, 0, 2, 12, 6, 8, 7, 0, 0, 0], 0).astype(np.int32)
    slots = np.random.default_rng(3).standard_normal((14, *states.shape[1:])).astype(np.float32)
    slots[reads[used]] = states[used]
    placed = dataclasses.replace(batch, slots=(jnp.asarray(reads), jnp.asarray(writes)))
    donated = jax.jit(run, donate_argnums=1)
    result, kept = donated(t, jnp.asarray(slots), placed)
    count = int(batch.cu_lengths[-1]) + batch.decode_rows
    for row in np.flatnonzero(used[: batch.decode_rows]):
        np.testing.assert_array_equal(result[row], out[row])
    np.testing.assert_array_equal(result[batch.decode_rows : count], out[batch.decode_rows : count])
    slots[writes[used]] = np.asarray(after)[used]
    np.testing.assert_array_equal(np.asarray(kept)[1:], slots[1:])  # slot 0 belongs to rows without a sequence


def test_on_a_cpu_no_array_of_states_is_copied() -> None:
    batch = dataclasses.replace(batch_of([7], []), slots=(jnp.asarray([3]), jnp.asarray([5])))
    t = {name: jnp.asarray(value) for name, value in tokens(1, seed=8).items()}
    for run, shape in ((delta, MATRIX), (scan, MATRIX), (convolve, TAIL)):
        states = jnp.zeros((14, *shape), jnp.float32)
        compiled = jax.jit(run, donate_argnums=1).lower(t, states, batch).compile()
        whole = ",".join(map(str, states.shape))
        assert not re.findall(rf"= f32\[{whole}\]\S* copy\(", compiled.as_text() or ""), run.__name__


@pytest.mark.parametrize("name", LAYERS)
def test_a_prompt_that_is_cut_at_edges_gives_the_same_bits(name: str) -> None:
    run, _, shape = LAYERS[name]
    t = tokens(300, seed=3)
    state = jnp.zeros((1, *shape), jnp.float32)
    whole, last = jax.jit(run)(t, state, batch_of([], [(0, 300)]))
    pieces, start = [], 0
    for count in (64, 128, 64, 44):
        out, state = jax.jit(run)(
            {k: v[start : start + count] for k, v in t.items()}, state, batch_of([], [(start, count)])
        )
        pieces.append(out)
        start += count
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    np.testing.assert_array_equal(state, last)


@pytest.mark.parametrize("name", LAYERS)
def test_a_sequence_has_the_same_bits_whatever_runs_beside_it(name: str) -> None:
    run, _, shape = LAYERS[name]
    # The suite's level of optimisation joins a product and a sum in one program and not in the other.
    optimised = {"xla_backend_optimization_level": 2}
    t = tokens(230, seed=4)
    states = np.random.default_rng(5).standard_normal((3, *shape)).astype(np.float32)
    out, after = jax.jit(run, compiler_options=optimised)(
        t, jnp.asarray(states), batch_of([], [(64, 70), (128, 100), (0, 60)])
    )
    alone, own = jax.jit(run, compiler_options=optimised)(
        {k: v[70:170] for k, v in t.items()}, jnp.asarray(states[1:2]), batch_of([], [(128, 100)])
    )
    np.testing.assert_array_equal(out[70:170], alone)
    np.testing.assert_array_equal(after[1], own[0])


def test_strong_decay_and_full_corrections_stay_finite() -> None:
    t = tokens(128, seed=6)
    t["decay"] = np.full_like(t["decay"], -60.0)
    t["beta"] = np.ones_like(t["beta"])
    t["k"] = np.broadcast_to(t["k"][:1], t["k"].shape).copy()  # one key again and again: the worst system
    out, after = delta(t, jnp.zeros((1, *MATRIX)), batch_of([], [(0, 128)]))
    result, state = expected(one_delta, t, np.zeros(MATRIX, np.float32))
    np.testing.assert_allclose(out, result, atol=3e-5)
    np.testing.assert_allclose(after[0], state, atol=3e-5)
