"""The samplers on the device against llama.cpp's algorithms in plain numpy: the same tokens, the same probabilities."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capabilities import plain_samplers as plain
from rekindle._src.capabilities.samplers import chain
from rekindle._src.capabilities.samplers.chain import Context, Numbers
from rekindle._src.capabilities.samplers.repetition import CLASSES, PER_WORD, REST, SEQUENCES, Breakers, Dry, Window
from rekindle._src.capabilities.samplers.repetition import penalties as dry_penalties
from rekindle._src.capabilities.samplers.step import ChainState, chain_of, numbers_of
from rekindle._src.core.sampling import Sampling
from rekindle._src.programs.request_state import NOWHERE, SlotAdmission

VOCAB, WIDTH = 200, 64


def numbers(samplings: Sequence[Sampling]) -> Numbers:
    values = np.array([numbers_of(sampling, VOCAB) for sampling in samplings], np.float32)
    return Numbers(*(jnp.asarray(values[:, column]) for column in range(values.shape[1])))


@functools.partial(jax.jit, static_argnames="fixed")
def narrowed(logits: Any, options: Numbers, chains: Any, seeds: Any, positions: Any, *, fixed: bool) -> Any:
    context = Context(seeds, positions, lambda: jnp.zeros_like(logits), deterministic=fixed)
    return chain.narrow(logits, options, chains, context)


def on_device(
    logits: np.ndarray, samplings: Sequence[Sampling], first_seed: int = 0, *, fixed: bool = False
) -> np.ndarray:
    """The logits [N, V] of rows with these options."""
    rows = len(samplings)
    seeds = np.stack([np.zeros(rows, np.uint32), np.arange(first_seed, first_seed + rows, dtype=np.uint32)], axis=1)
    chains = np.array([chain_of(sampling) for sampling in samplings], np.int32)
    return np.asarray(narrowed(logits, numbers(samplings), chains, seeds, np.full(rows, 9, np.int32), fixed=fixed))


def shares(logits: np.ndarray) -> np.ndarray:
    weights = np.exp((logits - logits.max(axis=-1, keepdims=True)).astype(np.float64))
    return weights / weights.sum(axis=-1, keepdims=True)


def acting(samplings: Sequence[Sampling], first_seed: int = 0) -> np.ndarray:
    """In which rows XTC acts."""
    rows = len(samplings)
    seeds = np.stack([np.zeros(rows, np.uint32), np.arange(first_seed, first_seed + rows, dtype=np.uint32)], axis=1)
    chances = np.asarray(chain.chances(jnp.asarray(seeds), jnp.full(rows, 9, jnp.int32)))
    return chances <= np.array([sampling.xtc_probability for sampling in samplings], np.float32)


MANY = [
    {"typical_p": 0.7}, {"typical_p": 0.15}, {"typical_p": 0.9, "temperature": 0.6}, {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.3, "temperature": 2.0}, {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02, "min_p": 0.1}, {"dynatemp_range": 0.5},
    {"dynatemp_range": 1.5, "dynatemp_exponent": 2.0, "top_k": 20}, {"dynatemp_range": 0.4, "top_n_sigma": 1.0},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.03, "typical_p": 0.85, "xtc_probability": 0.5, "temperature": 0.7},
    {"samplers": ["temperature", "top_p"], "top_p": 0.6, "temperature": 1.7},
    {"samplers": ["top_p", "temperature"], "top_p": 0.6, "temperature": 1.7},
    {"samplers": ["xtc", "top_k"], "top_k": 4, "xtc_probability": 1.0, "xtc_threshold": 0.03},
    {"samplers": ["top_k", "xtc"], "top_k": 4, "xtc_probability": 1.0, "xtc_threshold": 0.03},
    {"samplers": [], "temperature": 0.2, "top_k": 3},
    {"samplers": ["min_p", "typ_p", "temp"], "min_p": 0.2, "typical_p": 0.5},
    {"temperature": 0.0, "typical_p": 0.2}, {"temperature": 0.0, "dynatemp_range": 0.8},
    {"temperature": 0.0, "xtc_probability": 1.0, "xtc_threshold": 0.02}, {"temperature": 1e-30, "top_n_sigma": 2.0},
]  # fmt: skip


def made(options: dict[str, Any]) -> Sampling:
    return Sampling(**{"temperature": 1.0, "seed": 0} | options)


@pytest.mark.parametrize("seed", range(4))
def test_every_chain_leaves_the_tokens_and_probabilities_of_the_plain_one(seed: int) -> None:
    samplings = [made(options) for options in MANY]
    logits = (np.random.default_rng(seed).standard_normal((len(MANY), VOCAB)) * (1.5 + seed)).astype(np.float32)
    found, acts = shares(on_device(logits, samplings)), acting(samplings)
    for row, sampling in enumerate(samplings):
        expected = plain.chain(logits[row], sampling, acts=bool(acts[row]))
        assert ((found[row] > 0) == (expected > 0)).all(), MANY[row]
        np.testing.assert_allclose(found[row], expected, atol=1e-5, err_msg=str(MANY[row]))


def test_in_a_fixed_order_a_row_is_the_same_alone_and_among_others() -> None:
    samplings = [made(options) for options in MANY]
    logits = (np.random.default_rng(8).standard_normal((len(MANY), VOCAB)) * 3).astype(np.float32)
    together = on_device(logits, samplings, fixed=True)
    for row in range(0, len(MANY), 3):
        alone = on_device(logits[row : row + 1], samplings[row : row + 1], first_seed=row, fixed=True)
        np.testing.assert_array_equal(alone[0], together[row])


def test_a_row_without_a_chain_is_unchanged_to_the_bit() -> None:
    logits = np.random.default_rng(5).standard_normal((2, VOCAB)).astype(np.float32)
    logits[0, 3:90] = -np.inf
    samplings = [made({"samplers": []}), made({"typical_p": 0.3})]
    np.testing.assert_array_equal(on_device(logits, samplings)[0], logits[0])


def test_masked_tokens_stay_out_and_a_row_of_masks_has_no_nan() -> None:
    samplings = [made(options) for options in MANY]
    logits = np.random.default_rng(6).standard_normal((len(MANY), VOCAB)).astype(np.float32) * 2
    logits[:, ::2] = -np.inf
    found = on_device(logits, samplings)
    assert (found[:, ::2] == -np.inf).all()
    assert not np.isnan(found).any()
    assert np.isfinite(found.max(axis=-1)).all()
    nothing = on_device(np.full_like(logits, -np.inf), samplings)
    assert (nothing == -np.inf).all()


def test_xtc_acts_as_often_as_its_probability_says() -> None:
    samplings = [made({"xtc_probability": 0.3})] * 4_000
    assert 0.27 < acting(samplings).mean() < 0.33  # the seeds are fixed: it is the same each time


@pytest.mark.parametrize("tau", [1.0, 3.0, 6.0])
def test_mirostat_keeps_its_limit_of_surprise_from_token_to_token(tau: float) -> None:
    sampling = made({"mirostat": 2, "mirostat_tau": tau, "mirostat_eta": 0.3})
    options = numbers([sampling])
    rng = np.random.default_rng(2)
    limit, carried = 2.0 * tau, jnp.array([[2.0 * tau, 0.0]], jnp.float32)
    for _ in range(12):
        logits = (rng.standard_normal((1, VOCAB)) * 2.5).astype(np.float32)
        found = shares(np.asarray(chain.last(jnp.asarray(logits), options, carried, deterministic=False)))[0]
        kept = plain.mirostat(list(enumerate(logits[0].tolist())), limit)
        expected = plain.distribution(kept, VOCAB)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        token = int(rng.choice(VOCAB, p=expected))
        limit -= 0.3 * (-np.log2(expected[token]) - tau)
        carried = chain.carry_on(jnp.asarray(logits), options, carried, jnp.array([token]), deterministic=False)
        assert abs(float(carried[0, 0]) - limit) < 1e-4


def test_adaptive_p_prefers_tokens_of_its_target() -> None:
    sampling = made({"adaptive_target": 0.2, "adaptive_decay": 0.8})
    options = numbers([sampling])
    rng = np.random.default_rng(3)
    sums, weights = 0.2 / 0.2, 1 / 0.2
    carried = jnp.array([[sums, weights]], jnp.float32)
    for _ in range(12):
        logits = (rng.standard_normal((1, VOCAB)) * 2.5).astype(np.float32)
        logits[0, 50:] = -np.inf
        found = shares(np.asarray(chain.last(jnp.asarray(logits), options, carried, deterministic=False)))[0]
        candidates = list(enumerate(logits[0].tolist()))
        expected = plain.distribution(plain.adaptive(candidates, 0.2, sums, weights), VOCAB)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        token = int(rng.choice(VOCAB, p=expected))
        sums, weights = plain.softmax(candidates)[token] + 0.8 * sums, 1.0 + 0.8 * weights
        carried = chain.carry_on(jnp.asarray(logits), options, carried, jnp.array([token]), deterministic=False)
        np.testing.assert_allclose(carried[0], [sums, weights], rtol=1e-4)


# -- DRY

SMALL = 6  # tokens of a vocabulary where texts repeat
SETS: list[dict[int, list[tuple[int, ...]]]] = [
    {}, {5: [()]}, {5: [()], 4: [(3, 2)], 3: [(1,)]}, {4: [(), (1,)], 2: [(2, 2, 2), (1,)]},
]  # fmt: skip


def breakers_of(sets: Sequence[dict[int, list[tuple[int, ...]]]]) -> Breakers:
    classes = np.zeros((len(sets), -(-SMALL // PER_WORD)), np.int32)
    rests = np.full((len(sets), CLASSES, SEQUENCES, 1 + REST), -1, np.int32)
    for row, of_row in enumerate(sets):
        for number, (token, ways) in enumerate(of_row.items(), start=1):
            classes[row, token // PER_WORD] |= number << (4 * (token % PER_WORD))
            for place, rest in enumerate(ways):
                rests[row, number - 1, place, : 1 + len(rest)] = len(rest), *rest
    return Breakers(jnp.asarray(classes), jnp.asarray(rests))


@pytest.mark.parametrize("seed", range(3))
def test_dry_takes_what_the_plain_search_takes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    texts, samplings, sets = [], [], []
    for row in range(60):
        pattern = rng.integers(0, SMALL, rng.integers(1, 9))
        noise = rng.integers(0, SMALL, rng.integers(0, 12))
        texts.append(
            np.concatenate([np.tile(pattern, 12), noise, np.tile(pattern, 3)])[: int(rng.integers(1, WIDTH + 30))]
        )
        samplings.append(
            Sampling(
                dry_multiplier=float(rng.uniform(0.1, 2)), dry_base=float(rng.choice([1.0, 1.2, 1.75, 9.0, 1e4])),
                dry_allowed_length=int(rng.integers(0, 5)), dry_penalty_last_n=int(rng.choice([3, 20, WIDTH])),
            )
        )  # fmt: skip
        sets.append(SETS[row % len(SETS)])
    tokens = np.full((60, WIDTH), -1, np.int32)
    for row, text in enumerate(texts):
        latest = text[::-1][:WIDTH]
        tokens[row, : len(latest)] = latest
    lengths = [min(len(text), one.dry_penalty_last_n) for text, one in zip(texts, samplings, strict=True)]
    options = Dry(
        jnp.array([one.dry_multiplier for one in samplings], jnp.float32),
        jnp.array([one.dry_base for one in samplings], jnp.float32),
        jnp.array([one.dry_allowed_length for one in samplings]),
    )
    window = Window(jnp.asarray(tokens), jnp.array(lengths))
    found = np.asarray(dry_penalties(window, breakers_of(sets), options, SMALL))
    taken = 0
    for row, (text, sampling) in enumerate(zip(texts, samplings, strict=True)):
        expected = np.zeros(SMALL)
        for token, penalty in plain.dry(text, sampling, sets[row]).items():
            expected[token] = penalty
        np.testing.assert_allclose(found[row], expected, rtol=2e-4, err_msg=f"{text} {sampling} {sets[row]}")
        taken += (expected > 0).any()
    assert taken > 20


@pytest.mark.thorough
def test_what_is_no_text_continues_no_repetition_and_loses_nothing() -> None:
    """In the place of -1 each token may as well be another one that occurs nowhere else."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 3, (40, WIDTH)).astype(np.int32)
    hidden = rng.random(tokens.shape) < 0.2
    hidden[::2] = np.arange(WIDTH) // 8 % 3 == 1  # runs of them
    hidden[:10, 0] = True
    alone = np.where(hidden, SMALL + np.arange(WIDTH), tokens).astype(np.int32)
    lengths, sets = jnp.full(40, WIDTH), [{}, {7: [()]}] * 20
    for allowed in (0, 1, 2):
        options = Dry(jnp.full(40, 0.8), jnp.full(40, 1.75), jnp.full(40, allowed))
        masked = Window(jnp.asarray(np.where(hidden, -1, tokens)), lengths)
        found = np.asarray(dry_penalties(masked, breakers_of(sets), options, SMALL))
        wide = breakers_of(sets)
        more = -(-(SMALL + WIDTH) // PER_WORD) - wide.classes.shape[1]
        wide = wide._replace(classes=jnp.pad(wide.classes, ((0, 0), (0, more))))
        expected = dry_penalties(Window(jnp.asarray(alone), lengths), wide, options, SMALL + WIDTH)
        np.testing.assert_array_equal(found, np.asarray(expected)[:, :SMALL])
        assert (found > 0).any()


def test_a_slot_keeps_the_tokens_that_are_text() -> None:
    state = ChainState(VOCAB, 16)
    arrays = jax.tree.map(lambda shape: jnp.ones(shape.shape, shape.dtype), state.shapes(2))
    tokens = np.full(24, NOWHERE, np.int32)
    tokens[:20] = np.arange(20)
    tokens[[0, 17, 18]] = NOWHERE  # where rows stand
    admission = SlotAdmission(
        jnp.int32(1), jnp.asarray(tokens), jnp.zeros(state.ints, jnp.int32), jnp.zeros(state.floats)
    )
    recent = np.asarray(state.admit(arrays, admission).recent)
    assert recent[1].tolist() == [16, -1, -1, 19, *range(4, 16)]
