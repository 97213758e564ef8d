"""`session.rollout`: arrays for a loss, with the log-probabilities and the weights' version of each token."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import anyio
import jax
import numpy as np
import pytest
from flax import nnx

from helpers.driving import plain_logits, tiny_model
from helpers.sessions import engine_of, eventually, wait_until_idle
from helpers.small import CONTEXT, MODEL, opening, prompt
from helpers.thorough import trio_in_ci
from rekindle import FinishReason, RolloutBatch, Sampling, Session
from rekindle._src.evaluation.rollouts import draws_plainly
from rekindle._src.models.base import LoadedModel
from rekindle.errors import InvalidRequest
from rekindle.models import merge
from workshop import reference

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("large_steps")]
PROMPTS = [prompt(1, 11), prompt(2, 5), prompt(3, 18)]


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    async with opening(precompile="lazy") as made:
        yield made
        wait_until_idle(made)


def logprobs_of(model: LoadedModel, ids: list[int]) -> np.ndarray:
    """The plain loop's log-probabilities before each of `ids` but the first [n - 1, V]."""
    logits, _ = plain_logits(model, ids, reference.empty_cache(model, CONTEXT))
    return np.asarray(jax.nn.log_softmax(logits[:-1], axis=-1))


def some_steps(session: Session) -> None:
    before = session.stats().runner.steps
    eventually(lambda: session.stats().runner.steps >= before + 7)


def check(batch: RolloutBatch, models: list[LoadedModel]) -> None:
    """Every array against the completions and the plain loop; `models` are those of the versions."""
    for line, done in enumerate(batch.completions):
        start, end = int(batch.prompt_lengths[line]), int(batch.lengths[line])
        ids = batch.tokens[line, :end].tolist()
        assert ids == [*done.prompt_token_ids, *done.token_ids] and set(batch.tokens[line, end:].tolist()) <= {7}
        assert batch.mask[line].sum() == end and batch.finish_reasons[line] is done.finish_reason
        inside = np.zeros(batch.tokens.shape[1], bool)
        inside[start:end] = True
        assert (batch.completion_mask[line] == inside).all()
        assert not batch.logprobs[line, ~inside].any() and set(batch.versions[line, ~inside]) <= {-1}
        expected = {
            number: logprobs_of(models[number], ids) for number in set(batch.versions[line, start:end].tolist())
        }
        for place in range(start, end):
            version = int(batch.versions[line, place])
            assert batch.logprobs[line, place] == pytest.approx(expected[version][place - 1, ids[place]], abs=2e-4)


@trio_in_ci
async def test_the_arrays_are_those_of_the_completions(session: Session) -> None:
    batch = await session.rollout(PROMPTS, n=3, max_tokens=10, pad_id=7, pad_to=40)
    assert batch.tokens.shape == (9, 40) and batch.groups.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len({done.token_ids for done in batch.completions[:3]}) > 1, "nothing is drawn"
    check(batch, [MODEL])
    assert batch.usage.cached_tokens >= 2 * (8 + 16), "a prompt is computed once"
    assert set(batch.finish_reasons) <= {FinishReason.LENGTH, FinishReason.EOS}
    one = await session.rollout(PROMPTS[0], n=1, max_tokens=4, seed=1, pad_id=7)
    check(one, [MODEL])
    assert len(one) == 1 and one.tokens.shape[1] == one.lengths[0]
    assert (await session.rollout([], max_tokens=4)).tokens.shape == (0, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_log_probabilities_are_those_of_the_draws(session: Session) -> None:
    batch = await session.rollout(PROMPTS[:2], n=2, max_tokens=6, temperature=0.5, top_k=4, pad_id=7)
    possible: list[tuple[int, int, list[int]]] = []
    for line, done in enumerate(batch.completions):
        ids = batch.tokens[line].tolist()
        start, end = int(batch.prompt_lengths[line]), int(batch.lengths[line])
        logits = logprobs_of(MODEL, ids[:end])
        for place, entry in zip(range(start, end), done.logprobs or (), strict=True):
            top = np.argsort(-logits[place - 1])[:4]
            weights = np.exp(logits[place - 1, top] / 0.5)
            expected = np.log(weights[top.tolist().index(ids[place])] / weights.sum())
            assert batch.logprobs[line, place] == pytest.approx(expected, abs=1e-3)
            assert sorted(entry.support_ids.tolist()) == sorted(top.tolist())
            possible.append((line, place, sorted(top.tolist())))
    support = batch.support
    assert support is not None and len(support.ids) == support.offsets[-1, -1] == 4 * batch.completion_mask.sum()
    assert "at most 4 at one" in repr(support)
    mask = support.mask(MODEL.config.vocab_size)
    assert (mask.any(axis=-1) == batch.completion_mask).all()
    for line, place, ids in possible:
        first, end = support.offsets[line, place : place + 2]
        assert support.ids[first:end].tolist() == np.flatnonzero(mask[line, place]).tolist() == ids
    assert (await session.rollout(PROMPTS[0], n=1, max_tokens=2)).support is None, "all tokens were possible"


CHANGES = {  # what the draws are from: log-probabilities of the model's own distribution are others
    "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "logit_bias": {3: 1.0}, "min_tokens": 2, "allowed_token_ids": (3, 4), "bad_words": ("a",),
    "processors": ("one",), "schema": {"type": "string"}, "regex": "a", "choice": ("a",), "grammar": "root ::= 'a'",
    "json": True, "typical_p": 0.9, "top_n_sigma": 1.0, "xtc_probability": 0.5, "dry_multiplier": 0.8,
    "dynatemp_range": 0.5, "mirostat": 2, "adaptive_target": 0.5, "samplers": ("top_k", "temperature"),
}  # fmt: skip
KEEPS = {
    "max_tokens", "seed", "n", "stop", "stop_token_ids", "include_stop", "ignore_eos", "logprobs", "prompt_logprobs",
    "logprob_start", "logprob_token_ids", "logprobs_of", "capture", "steer", "patch", "taps", "priority", "adapter",
    "salt", "lenient", "whitespace_flexible", "until", "stop_repeats",
    # Of no effect unless the sampler that they belong to is on.
    "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
    "dynatemp_exponent", "mirostat_tau", "mirostat_eta", "adaptive_decay",
}  # fmt: skip


def test_every_option_that_changes_the_draws_is_known_to_rollouts() -> None:
    assert {field.name for field in dataclasses.fields(Sampling)} == {*CHANGES, *KEEPS}, (
        "an option is new: which is it?"
    )
    assert draws_plainly(Sampling(temperature=1.0, seed=1, max_tokens=5, stop=("a",), ignore_eos=True))
    unheeded = [name for name, value in CHANGES.items() if draws_plainly(Sampling(**{"temperature": 1.0, name: value}))]
    assert not unheeded


@trio_in_ci
async def test_groups_come_as_they_end(session: Session) -> None:
    seen: list[int] = []
    # More sequences than the session runs at once, of different lengths.
    async for group in session.rollout([*PROMPTS, *PROMPTS], n=2, max_tokens=5, pad_id=7):
        assert len(group) == 2 and len(set(group.groups.tolist())) == 1
        check(group, [MODEL])
        seen.append(int(group.groups[0]))
    assert sorted(seen) == list(range(6))
    call = session.rollout(PROMPTS, n=2, max_tokens=30, ignore_eos=True)
    groups = aiter(call)
    assert len(await anext(groups)) == 2
    await groups.aclose()  # type: ignore[attr-defined]
    await anyio.to_thread.run_sync(wait_until_idle, session)  # the rest was aborted


async def test_options_are_checked(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="pad_to"):
        await session.rollout(PROMPTS[0], n=1, max_tokens=4, pad_to=12)
    for wrong in ({"pad_to": 0}, {"pad_id": -1}, {"pad_id": 1.5}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            session.rollout(PROMPTS[0], **wrong)  # type: ignore[arg-type]


@trio_in_ci
@pytest.mark.parametrize("swaps", [6, pytest.param(200, marks=pytest.mark.slow)])
async def test_weights_swapped_under_load_are_told_apart_token_by_token(session: Session, swaps: int) -> None:
    """A trainer's arrays take the place of the weights, without a copy or a program, while sequences go on."""
    models = [MODEL, tiny_model(seed=6), tiny_model(seed=8)]
    states = [nnx.state(merge(model.graph, model.leaves), nnx.Param) for model in models]
    await session.rollout(PROMPTS, n=2, max_tokens=2)
    programs: Any = engine_of(session).runner.programs
    for size in programs.lattice.ahead:  # which steps there are depends on when requests come in
        await anyio.to_thread.run_sync(programs.get, size)
    compiled = session.stats().compilations
    used = [MODEL]
    batches: list[RolloutBatch] = []

    async def roll() -> None:
        while len(used) <= swaps:
            options: dict[str, Any] = {"n": 2, "max_tokens": 24, "ignore_eos": True, "pad_id": 7}
            batches.append(await session.rollout(PROMPTS, **options))

    async with anyio.create_task_group() as group:
        group.start_soon(roll)
        while len(used) <= swaps:
            await anyio.to_thread.run_sync(some_steps, session)
            number = len(used) % 3
            used.append(models[number])
            assert await session.swap_weights(states[number]) == len(used) - 1
    leaves = engine_of(session).runner.calls.leaves
    last = used[-1].leaves
    assert [leaf.unsafe_buffer_pointer() for leaf in leaves] == [leaf.unsafe_buffer_pointer() for leaf in last]
    assert session.stats().compilations == compiled
    for batch in batches[:: max(1, len(batches) // 5)]:
        check(batch, used)
    assert any(len(set(done.weights_versions)) > 1 for batch in batches for done in batch.completions)
    assert {version for batch in batches for done in batch.completions for version in done.weights_versions} > {0, 1}
