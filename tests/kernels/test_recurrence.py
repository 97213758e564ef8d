"""Recurrent layers against a loop over single tokens, however a prompt is cut and whatever runs along with it."""

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

from helpers.thorough import by_default
from rekindle_kernels.ops.recurrence import (
    ChannelDeltaOptions,
    ConvolutionOptions,
    DeltaOptions,
    DeltaWeights,
    RaggedBatch,
    ScanOptions,
    ScanWeights,
    causal_convolution,
    channel_delta,
    gated_delta,
    selective_scan,
)

HEADS, KEY_HEADS, KEY, VALUE, GROUPS, CHANNELS, TAPS = 4, 2, 16, 32, 2, 144, 4  # one vector more than a block has
EPS, FIRST = 1e-5, 3  # columns of `projected` in front of what is read
GATE, STEP = FIRST, FIRST + HEADS * VALUE
BETA = STEP + HEADS
IMPLEMENTATIONS = ["native", "rows", "xla"]
Array = NDArray[Any]
Tokens = dict[str, Any]


def tokens(count: int, seed: int) -> Tokens:
    rng = np.random.default_rng(seed)
    widths = {
        "qkv": 2 * KEY_HEADS * KEY + HEADS * VALUE,
        "projected": BETA + HEADS,
        "channels": HEADS * VALUE + 2 * GROUPS * KEY,
        "x": 3 * CHANNELS + FIRST,
        "heads": HEADS * (2 * KEY + VALUE),
        "decays": 2 * FIRST + HEADS * (VALUE + KEY + 1),
    }
    return {name: rng.standard_normal((count, width)).astype(np.float32) for name, width in widths.items()}


def drawn(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


WEIGHT, BIAS, NORM, SKIP = drawn(99, CHANNELS, TAPS), drawn(98, CHANNELS), drawn(96, VALUE), drawn(95, HEADS)
STEP_BIAS, LOG_RATE = drawn(94, HEADS) - 1, np.log(np.asarray([0.1, 0.6, 1.0, 2.0], np.float32))
DELTA = DeltaOptions(KEY_HEADS, GATE, BETA, STEP, EPS)
CHANNEL_STEP = FIRST + HEADS * VALUE  # of `decays`: gates, steps, weights of corrections
CHANNEL_BETA = CHANNEL_STEP + HEADS * KEY
CHANNEL_BIAS = drawn(93, HEADS * KEY) - 1
FACTORS = ConvolutionOptions(first=2 * CHANNELS, before=FIRST, behind=CHANNELS + FIRST)


def delta(t: Tokens, states: Any, batch: RaggedBatch, **options: Any) -> Any:
    weights = DeltaWeights(*map(jnp.asarray, (STEP_BIAS, LOG_RATE, NORM)))
    return gated_delta(t["qkv"], t["projected"], weights, states, batch, DELTA, **options)


def channels(t: Tokens, states: Any, batch: RaggedBatch, *, bound: float | None = -5.0, **options: Any) -> Any:
    weights = DeltaWeights(*map(jnp.asarray, (CHANNEL_BIAS, LOG_RATE, NORM)))
    static = ChannelDeltaOptions(FIRST, CHANNEL_BETA, CHANNEL_STEP, EPS, bound)
    return channel_delta(t["heads"], t["decays"], weights, states, batch, static, **options)


def unbounded(t: Tokens, states: Any, batch: RaggedBatch, **options: Any) -> Any:
    return channels(t, states, batch, bound=None, **options)


def scan(t: Tokens, states: Any, batch: RaggedBatch, **options: Any) -> Any:
    weights = ScanWeights(*map(jnp.asarray, (STEP_BIAS, LOG_RATE, SKIP)))
    return selective_scan(t["channels"], t["projected"], weights, states, batch, ScanOptions(GROUPS, STEP), **options)


def convolve(t: Tokens, states: Any, batch: RaggedBatch, **options: Any) -> Any:
    silu = ConvolutionOptions(first=FIRST, silu=True)
    return causal_convolution(t["x"], jnp.asarray(WEIGHT), jnp.asarray(BIAS), states, batch, options=silu, **options)


def between_factors(t: Tokens, states: Any, batch: RaggedBatch, **options: Any) -> Any:
    return causal_convolution(t["x"], jnp.asarray(WEIGHT), None, states, batch, options=FACTORS, **options)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def steps_of(t: Tokens, i: int) -> tuple[Array, Array]:
    """The steps of a token, and the factors of the states."""
    steps = np.log1p(np.exp(t["projected"][i, STEP : STEP + HEADS] + STEP_BIAS))
    return steps, np.exp(-np.exp(LOG_RATE) * steps)[:, None, None]


def one_delta(t: Tokens, i: int, state: Array) -> tuple[Array, Array]:
    keys, row = KEY_HEADS * KEY, t["projected"][i]
    q, k = (t["qkv"][i, at : at + keys].reshape(KEY_HEADS, KEY) for at in (0, keys))
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q * 1.0, k * 1.0))
    q, k = (np.repeat(x, HEADS // KEY_HEADS, axis=0) for x in (q * KEY**-0.5, k))
    v, gate = t["qkv"][i, 2 * keys :].reshape(HEADS, VALUE), row[GATE:STEP].reshape(HEADS, VALUE)
    state = state * steps_of(t, i)[1]
    change = sigmoid(row[BETA:])[:, None] * (v - np.einsum("hd,hdv->hv", k, state))
    state = state + k[..., None] * change[:, None]
    out = np.einsum("hd,hdv->hv", q, state)
    normed = out / np.sqrt(np.mean(out * out, axis=-1, keepdims=True) + EPS) * NORM
    return (normed * gate * sigmoid(gate)).reshape(-1), state


def one_channels(t: Tokens, i: int, state: Array, bound: float | None = -5.0) -> tuple[Array, Array]:
    row = t["decays"][i]
    q, k = (t["heads"][i, at : at + HEADS * KEY].reshape(HEADS, KEY) for at in (0, HEADS * KEY))
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    v, gate = t["heads"][i, 2 * HEADS * KEY :].reshape(HEADS, VALUE), row[FIRST:CHANNEL_STEP].reshape(HEADS, VALUE)
    steps = (row[CHANNEL_STEP:CHANNEL_BETA] + CHANNEL_BIAS).reshape(HEADS, KEY)
    rate = np.exp(LOG_RATE)[:, None]
    state = (
        state * np.exp(-rate * np.log1p(np.exp(steps)) if bound is None else bound * sigmoid(rate * steps))[..., None]
    )
    beta = sigmoid(row[CHANNEL_BETA : CHANNEL_BETA + HEADS])[:, None]
    state = state + k[..., None] * (beta * (v - np.einsum("hd,hdv->hv", k, state)))[:, None]
    out = np.einsum("hd,hdv->hv", q * KEY**-0.5, state)
    normed = out / np.sqrt(np.mean(out * out, axis=-1, keepdims=True) + EPS) * NORM
    return (normed * sigmoid(gate)).reshape(-1), state


def one_unbounded(t: Tokens, i: int, state: Array) -> tuple[Array, Array]:
    return one_channels(t, i, state, bound=None)


def one_scan(t: Tokens, i: int, state: Array) -> tuple[Array, Array]:
    values, keys, row = HEADS * VALUE, GROUPS * KEY, t["channels"][i]
    x = row[:values].reshape(HEADS, VALUE)
    b, c = (
        np.repeat(row[at : at + keys].reshape(GROUPS, KEY), HEADS // GROUPS, axis=0) for at in (values, values + keys)
    )
    steps, factors = steps_of(t, i)
    state = state * factors + b[..., None] * (x * steps[:, None])[:, None]
    return (np.einsum("hd,hdv->hv", c, state) + SKIP[:, None] * x).reshape(-1), state


def one_convolution(t: Tokens, i: int, state: Array) -> tuple[Array, Array]:
    inputs = np.concatenate([state, t["x"][i][None, FIRST : FIRST + CHANNELS]])
    sums = np.sum(inputs * WEIGHT.T, axis=0) + BIAS
    return sums * sigmoid(sums), inputs[1:]


def one_between_factors(t: Tokens, i: int, state: Array) -> tuple[Array, Array]:
    row = t["x"][i]
    before, behind, x = (row[at : at + CHANNELS] for at in (FIRST, CHANNELS + FIRST, 2 * CHANNELS))
    inputs = np.concatenate([state, (before * x)[None]])
    return behind * np.sum(inputs * WEIGHT.T, axis=0), inputs[1:]


MATRIX, TAIL = (HEADS, KEY, VALUE), (TAPS - 1, CHANNELS)
LAYERS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "gated_delta": (delta, one_delta, MATRIX),
    "channel_delta": (channels, one_channels, MATRIX),
    "channel_delta, unbounded": (unbounded, one_unbounded, MATRIX),
    "selective_scan": (scan, one_scan, MATRIX),
    "convolution": (convolve, one_convolution, TAIL),
    "between_factors": (between_factors, one_between_factors, TAIL),
}


FORMS = [(name, implementation) for name in LAYERS for implementation in IMPLEMENTATIONS]
# By default every native form, and two by XLA, which compiles each for seconds.
EVERY_FORM = by_default(
    FORMS, lambda case: case[1] == "native" or case in (("gated_delta", "xla"), ("channel_delta", "rows"))
)


def expected(one: Callable[..., tuple[Array, Array]], t: Tokens, state: Array) -> tuple[Array, Array]:
    results = []
    for i in range(len(t["x"])):
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


@pytest.mark.parametrize(("name", "implementation"), EVERY_FORM)
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


@pytest.mark.parametrize("name", LAYERS)
def test_native_results_of_rows_without_a_sequence_are_zeros(name: str) -> None:
    """Rows of padding used to be left uninitialised. A NaN in one of them spread to real rows in XLA's scan."""
    run, _, shape = LAYERS[name]
    batch = batch_of([7, -1], [(0, 3)], most=3)
    states = jnp.zeros((len(batch.lengths), *shape), jnp.float32)
    t = {key: jnp.asarray(value) for key, value in tokens(14, seed=1).items()}
    step = jax.jit(partial(run, implementation="native"))
    out = step(t, states, batch)[0]
    for _ in range(20):
        dirty = [jnp.full(out.shape, jnp.nan).block_until_ready() for _ in range(20)]
        del dirty
        out = np.asarray(step(t, states, batch)[0])
        assert np.isfinite(out).all()
        assert not out[[1, *range(5, 14)]].any()


def test_on_a_cpu_no_array_of_states_is_copied() -> None:
    batch = dataclasses.replace(batch_of([7], []), slots=(jnp.asarray([3]), jnp.asarray([5])))
    t = {name: jnp.asarray(value) for name, value in tokens(1, seed=8).items()}
    for run, shape in ((delta, MATRIX), (channels, MATRIX), (scan, MATRIX), (convolve, TAIL)):
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


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strong_decay_and_full_corrections_stay_finite(implementation: str) -> None:
    t, keys = tokens(128, seed=6), KEY_HEADS * KEY
    t["projected"][:, STEP:BETA] = 60.0
    t["projected"][:, BETA:] = 30.0
    t["qkv"][:, keys : 2 * keys] = t["qkv"][:1, keys : 2 * keys]  # one key again and again: the worst system
    out, after = delta(t, jnp.zeros((1, *MATRIX)), batch_of([], [(0, 128)]), implementation=implementation)
    result, state = expected(one_delta, t, np.zeros(MATRIX, np.float32))
    np.testing.assert_allclose(out, result, atol=3e-5)
    np.testing.assert_allclose(after[0], state, atol=3e-5)


@pytest.mark.parametrize(("implementation", "bound"), [("native", -5.0), ("rows", -5.0), ("rows", None)])
def test_the_strongest_decays_of_channels_stay_exact(implementation: str, bound: float | None) -> None:
    """64 tokens of -5 make a factor of exp(-320), and its inverse overflows: no product may need that."""
    t = tokens(128, seed=6)
    t["decays"][:, CHANNEL_STEP:CHANNEL_BETA] = np.where(np.arange(HEADS * KEY) % 2, 30.0, -30.0)
    t["decays"][::16, CHANNEL_STEP:CHANNEL_BETA] *= -1
    t["decays"][:, CHANNEL_BETA:] = 30.0
    t["heads"][:, HEADS * KEY : 2 * HEADS * KEY] = t["heads"][:1, HEADS * KEY : 2 * HEADS * KEY]
    run = partial(channels, bound=bound, implementation=implementation)
    out, after = run(t, jnp.zeros((1, *MATRIX)), batch_of([], [(0, 128)]))
    result, state = expected(partial(one_channels, bound=bound), t, np.zeros(MATRIX, np.float32))
    np.testing.assert_allclose(out, result, atol=3e-5)
    np.testing.assert_allclose(after[0], state, atol=3e-5)


@pytest.mark.thorough
def test_derivatives_compute_the_factors_of_channels_again() -> None:
    """They are a vector for each pair of tokens in a block; those of all chunks took 20 MiB here."""
    batch = dataclasses.replace(batch_of([], [(0, 512)]), differentiable=True)
    t = {name: jnp.asarray(value) for name, value in tokens(512, seed=1).items()}

    def value(heads: jax.Array) -> jax.Array:
        out, _ = channels({**t, "heads": heads}, jnp.zeros((1, *MATRIX)), batch, implementation="xla")
        return out.sum()

    compiled = jax.jit(jax.grad(value)).lower(t["heads"]).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 15 << 20


def test_a_deterministic_call_is_not_computed_by_xla() -> None:
    batch, t = batch_of([7], []), {key: jnp.asarray(value) for key, value in tokens(1, seed=1).items()}
    weights, options = ScanWeights(*map(jnp.asarray, (STEP_BIAS, LOG_RATE, SKIP))), ScanOptions(GROUPS, STEP, True)
    states = jnp.zeros((1, *MATRIX))
    with pytest.raises(ValueError, match="depend on what is computed with it"):
        selective_scan(t["channels"], t["projected"], weights, states, batch, options, implementation="rows")
    odd = {"channels": t["channels"][:, :-8], "projected": t["projected"], "weights": weights, "batch": batch}
    with pytest.raises(ValueError, match=r"no implementation of selective_scan .* states of 14 x 32 are not whole"):
        selective_scan(**odd, states=states[:, :, :14], options=options)


@pytest.mark.parametrize("name", LAYERS)
def test_native_states_have_the_same_bits_as_a_prompt_and_as_generated_text(name: str) -> None:
    run, _, shape = LAYERS[name]
    run, t = partial(run, implementation="native"), tokens(90, seed=7)
    state = jnp.zeros((1, *shape), jnp.float32)
    whole, last = jax.jit(run)(t, state, batch_of([], [(0, 90)]))
    cut, step = jax.jit(run), jax.jit(run)
    out, state = cut({k: v[:37] for k, v in t.items()}, state, batch_of([], [(0, 37)]))
    pieces = [out]
    for i in range(37, 90):
        out, state = step({k: v[i : i + 1] for k, v in t.items()}, state, batch_of([i], []))
        pieces.append(out)
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    np.testing.assert_array_equal(state, last)


@pytest.mark.parametrize(
    ("name", "implementation"),
    by_default(
        FORMS,
        lambda case: case[1] == "native" or case in (("gated_delta", "rows"), ("selective_scan", "xla")),
    ),
)
def test_rows_of_a_chain_leave_the_states_of_single_tokens(name: str, implementation: str) -> None:
    """Each reads what the one before it writes. All states are there afterwards: any of them can be continued."""
    run, plain, shape = LAYERS[name]
    run, t = partial(run, implementation=implementation), tokens(14 + 66, seed=8)
    chains = [(0, 1), (1, 4), (5, 1), (6, 6), (12, 2)]  # rows 12 and 13: from position 0 on
    starts = [7, 30, -1, 100, 0]
    lengths, reads, writes, slot = [0] * 14, [0] * 14, [0] * 14, 1
    for (first, count), start in zip(chains, starts, strict=True):
        for row in range(first, first + count if start >= 0 else first):
            lengths[row] = start + 1 + row - first
            reads[row], writes[row] = (slot, slot + 1) if row > first else (slot, slot if count == 1 else slot + 1)
            slot = writes[row] if row + 1 < first + count else writes[row] + 1
    places = [0, 0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5, 0, 1]
    ints = partial(np.asarray, dtype=np.int32)
    slots = np.random.default_rng(9).standard_normal((slot + 2, *shape)).astype(np.float32)
    reads, writes, lengths = [*reads, slot], [*writes, slot + 1], [*lengths, 64 + 66]  # a prompt next to them
    used = jnp.asarray(ints(reads)), jnp.asarray(ints(writes))
    sizes = map(jnp.asarray, (ints(lengths), ints([0, 66]), ints(1)))
    batch = RaggedBatch(*sizes, 14, used, jnp.asarray(ints(places)))
    out, after = jax.jit(run, donate_argnums=1)(t, jnp.asarray(slots), batch)
    single = jax.jit(run)

    def one(t: Tokens, state: Any, batch: RaggedBatch) -> tuple[Any, Any]:
        """By the native kernel to the last bit, and by the definition elsewhere."""
        if implementation == "native":
            return single(t, state, batch)
        begins = int(batch.lengths[0]) == len(t["x"])  # from a state of zeros
        result, after = expected(plain, t, np.zeros(shape, np.float32) if begins else np.asarray(state[0]))
        return result, after[None]

    for (first, count), start in zip(chains, starts, strict=True):
        state = jnp.asarray(slots[reads[first]])[None]
        for row in range(first, first + count if start >= 0 else first):
            alone = {key: value[row : row + 1] for key, value in t.items()}
            result, state = one(alone, state, batch_of([start + row - first], []))
            same = (
                np.testing.assert_array_equal
                if implementation == "native"
                else partial(np.testing.assert_allclose, rtol=5e-6, atol=3e-5)
            )
            same(out[row], result[0])
            same(after[writes[row]], state[0])
    prompt = batch_of([], [(64, 66)])
    result, state = one({key: value[14:] for key, value in t.items()}, jnp.asarray(slots[slot])[None], prompt)
    np.testing.assert_allclose(out[14:], result, rtol=5e-6, atol=3e-5)
    np.testing.assert_allclose(after[slot + 1], state[0], rtol=5e-6, atol=3e-5)
