"""Log-probabilities of the distribution that was drawn from, of named tokens, and of the whole vocabulary."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import jax
import numpy as np
import pytest

import rekindle
from helpers import plain_sampling
from helpers.driving import plain_tokens
from helpers.small import LEAST, MODEL, VOCAB, opening, plain, prompt
from helpers.thorough import one_event_loop  # noqa: F401  the fixture
from rekindle import Sampling, Session, TokenLogprobs
from rekindle.errors import InvalidRequest

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("large_steps")]
NEW = 12
DRAWS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 7},
    {"temperature": 1.0, "top_k": 200},
    {"temperature": 1.5, "top_p": 0.6},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.7, "frequency_penalty": 0.5, "logit_bias": {9: 6.0, 11: -np.inf}},
    {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 1.0},
    {},
    {"repetition_penalty": 1.5},
]


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    async with opening(processors=[LEAST], precompile="lazy") as made:
        yield made


def before_each(ids: list[int], tokens: tuple[int, ...]) -> list[np.ndarray]:
    """The plain loop's logits before each of `tokens`."""
    following = iter(tokens)
    return plain_tokens(MODEL, ids, len(tokens), lambda logits, output: next(following))[1]


def probabilities(entry: TokenLogprobs) -> np.ndarray:
    """The distribution that an entry with all of its alternatives describes."""
    result = np.zeros(VOCAB)
    result[list(entry.top_ids)] = np.exp(entry.top_logprobs)
    return result


async def test_logprobs_are_those_of_the_distribution_after_every_option(session: Session) -> None:
    """All options at once in one batch, along with a row that wants the model's own log-probabilities."""
    ids = prompt(3, 9)
    own = session.submit(ids, max_tokens=NEW, logprobs=2, ignore_eos=True)
    options = {"max_tokens": NEW, "ignore_eos": True, "logprobs": VOCAB, "logprobs_of": "sampled"}
    handles = [
        session.submit(ids, seed=index, **options, **draw)
        for index, draw in enumerate(DRAWS)
        if "logit_bias" not in draw
    ]
    handles += [session.submit(ids, seed=4, **options, **draw) for draw in DRAWS if "logit_bias" in draw]
    for handle in handles:
        done = await handle
        sampling, entries = done.sampling, done.logprobs
        assert entries is not None and [one.token_id for one in entries] == list(done.token_ids)
        for place, (logits, entry) in enumerate(zip(before_each(ids, done.token_ids), entries, strict=True)):
            shaped = plain_sampling.shaped(logits, sampling, ids, done.token_ids[:place])
            expected = plain_sampling.distribution(shaped, sampling)
            found = probabilities(entry)
            assert found.sum() == pytest.approx(1.0, abs=1e-5)
            assert entry.support_ids.tolist() == np.flatnonzero(found).tolist()
            assert np.exp(entry.logprob) == pytest.approx(found[entry.token_id])
            # Tokens on the border of a nucleus may fall to either side.
            border = np.flatnonzero((found > 0) != (expected > 0))
            assert len(border) <= 1
            if not len(border):
                np.testing.assert_allclose(found, expected, atol=2e-5)
    assert (await own).token_ids == plain(ids, NEW)
    scores = (await own).logprobs or ()
    for logits, entry in zip(before_each(ids, (await own).token_ids), scores, strict=True):
        assert entry.logprob == pytest.approx(float(jax.nn.log_softmax(logits).max()), abs=1e-4)
        assert len(entry.top_ids) == 2 and entry.support == b"" and not len(entry.support_ids)


@pytest.mark.thorough
async def test_processors_change_what_is_drawn_from(session: Session) -> None:
    ids = prompt(6, 5)
    done = await session.generate(
        ids, max_tokens=4, temperature=1.0, seed=1, processors="least", logprobs=VOCAB, logprobs_of="sampled"
    )
    for logits, entry in zip(before_each(ids, done.token_ids), done.logprobs or (), strict=True):
        expected = plain_sampling.distribution(-np.asarray(logits), Sampling(temperature=1.0))
        np.testing.assert_allclose(probabilities(entry), expected, atol=2e-5)


async def test_named_tokens_and_many_alternatives_are_the_models_own(session: Session) -> None:
    ids, named = prompt(2, 6), (5, VOCAB - 1, 17)
    options: dict[str, Any] = {"max_tokens": 5, "temperature": 0.5, "top_k": 3, "seed": 2, "ignore_eos": True}
    done = await session.generate(ids, logprob_token_ids=named, **options)
    many = await session.generate(ids, logprobs=100, **options)
    assert done.token_ids == many.token_ids == (await session.generate(ids, logprobs=3, **options)).token_ids
    expected = [np.asarray(jax.nn.log_softmax(logits)) for logits in before_each(ids, done.token_ids)]
    for logprobs, entry, wide in zip(expected, done.logprobs or (), many.logprobs or (), strict=True):
        assert entry.top_ids == () and entry.of_ids == pytest.approx([logprobs[token] for token in named], abs=1e-4)
        assert entry.logprob == wide.logprob == pytest.approx(logprobs[entry.token_id], abs=1e-4)
        np.testing.assert_allclose(wide.top_logprobs, np.sort(logprobs)[::-1][:100], atol=1e-4)
        np.testing.assert_allclose(logprobs[list(wide.top_ids)], wide.top_logprobs, atol=1e-4)


def wide(session: Session) -> dict[str, int]:
    """The steps of programs that compute log-probabilities of the whole vocabulary."""
    return {name: steps for name, steps in session.programs().steps.items() if "+distribution" in name}


async def test_only_steps_that_need_it_run_in_other_programs(session: Session) -> None:
    before = wide(session)
    await session.generate(prompt(2, 6), max_tokens=3, logprobs=20)
    assert {name for name, steps in wide(session).items() if steps != before.get(name)} == set()
    await session.generate(prompt(2, 6), max_tokens=3, logprobs=21)
    assert {name for name, steps in wide(session).items() if steps != before.get(name)}
    compiled = session.stats().compilations
    done = await session.generate(prompt(2, 6), max_tokens=3, temperature=1.0, logprobs_of="sampled")
    assert session.stats().compilations == compiled
    assert done.logprobs is not None and [len(one.support_ids) for one in done.logprobs] == [VOCAB] * 3


async def test_tokens_beyond_the_vocabulary_are_refused(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="logprob_token_ids"):
        await session.generate(prompt(1, 3), logprob_token_ids=[VOCAB])
    with pytest.raises(InvalidRequest, match="logprobs_of"):
        session.generate(prompt(1, 3), logprobs_of="processed")  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        session.generate(prompt(1, 3), prompt_logprobs=21)


@pytest.mark.thorough
async def test_a_grammar_bounds_the_support() -> None:
    pytest.importorskip("llguidance", reason="structured output needs the extra `structured`")
    options: dict[str, Any] = {"max_requests": 2, "max_tokens_per_step": 32, "max_model_len": 128, "precompile": "lazy"}
    async with rekindle.open("tiny", dtype="float32", **options) as session:
        handles = [
            session.submit("My favourite is", choice=["red", "blue", "reddish"], temperature=1.0, seed=seed, logprobs=5,
                           logprobs_of="sampled", top_p=top_p)
            for seed, top_p in ((1, 1.0), (2, 0.9))
        ]  # fmt: skip
        for handle, top_p in zip(handles, (1.0, 0.9), strict=True):
            done = await handle
            assert done.text in ("red", "blue", "reddish") and done.logprobs
            for place, entry in enumerate(done.logprobs):
                allowed = session.allowed(done, at=place)
                assert allowed is not None
                support = set(entry.support_ids.tolist())
                assert entry.token_id in support <= set(allowed.token_ids)
                if top_p == 1.0 and len(allowed.token_ids) <= 5:
                    assert np.exp(entry.top_logprobs).sum() == pytest.approx(1.0, abs=1e-5)
                    assert support == set(entry.top_ids)
