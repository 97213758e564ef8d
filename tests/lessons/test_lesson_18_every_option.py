"""Every sampling option that is accepted is applied; an option that is not supported raises an error that names it.

Upstream: https://github.com/vllm-project/vllm/issues/12678
Logits processors and min_p were accepted and ignored.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rekindle
from helpers import plain_sampling
from helpers.driving import plain_tokens
from helpers.fakes import FakeModel
from helpers.sessions import CONFIG, expected, opened
from helpers.small import LEAST, MODEL, OPTIONS, VOCAB, plain, prompt
from helpers.thorough import one_event_loop  # noqa: F401  the fixture
from rekindle import FinishReason, Sampling, Session
from rekindle.errors import InvalidRequest

pytestmark = pytest.mark.usefixtures("large_steps")
NEW = 16
SHAPING: dict[str, dict[str, Any]] = {  # options that change what is likeliest, which a greedy request shows exactly
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "logit_bias": {"logit_bias": {7: 100.0, 9: 99.0}, "frequency_penalty": 2.0},
    "min_tokens": {"min_tokens": 5},
}
DRAWING: dict[str, dict[str, Any]] = {  # options that narrow a draw at temperature 1
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.3},
    "min_p": {"min_p": 0.4},
}
ELSEWHERE = {  # each has a test of its own, below or where it says
    "max_tokens", "temperature", "seed", "n", "stop", "stop_token_ids", "include_stop", "ignore_eos", "logprobs",
    "prompt_logprobs", "priority", "processors", "salt",
    # tests/session/test_samplers.py and tests/capabilities/test_sampler_chain.py
    "top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent", "samplers",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
    "mirostat", "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay",
    # tests/text/test_text_ends.py
    "until", "stop_repeats",
    # tests/session/test_token_rules.py
    "allowed_token_ids", "bad_words",
    # tests/session/test_scoring.py
    "logprob_start",
    # tests/session/test_logprobs.py
    "logprob_token_ids", "logprobs_of",
    # tests/session/test_taps.py
    "capture", "steer", "patch",
    # tests/session/test_custom_taps.py
    "taps",
    # tests/session/test_adapters.py
    "adapter",
    # tests/session/test_structured.py
    "schema", "regex", "choice", "grammar", "json", "lenient", "whitespace_flexible",
}  # fmt: skip

anyio_test = pytest.mark.anyio


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with rekindle.open_sync(MODEL, **OPTIONS | {"processors": [LEAST], "precompile": "lazy"}) as made:
        yield made


def logits_along(ids: list[int], tokens: tuple[int, ...]) -> list[np.ndarray]:
    """What the model says before each of `tokens`, by the plain loop."""
    following = iter(tokens)
    return plain_tokens(MODEL, ids, len(tokens), lambda logits, output: next(following))[1]


def shaped(ids: list[int], sampling: Sampling, ends: tuple[int, ...]) -> list[int]:
    """The plain loop's greedy tokens with options from plain numpy."""

    def choose(logits: np.ndarray, output: list[int]) -> int:
        return int(np.argmax(plain_sampling.shaped(logits, sampling, ids, output, ends)))

    return plain_tokens(MODEL, ids, sampling.max_tokens, choose)[0]


def first(prompts: Callable[[list[int]], bool]) -> list[int]:
    """A prompt on which an option shows."""
    return next(ids for seed in itertools.count() if prompts(ids := prompt(seed, 4 + seed % 9)))


def test_lesson_18_no_option_is_forgotten_here() -> None:
    assert {*SHAPING, *DRAWING, *ELSEWHERE} == {field.name for field in dataclasses.fields(Sampling)}


@anyio_test
@pytest.mark.parametrize("name", SHAPING)
async def test_lesson_18_options_that_shape_the_logits_are_applied_exactly(session: Session, name: str) -> None:
    sampling = Sampling(max_tokens=NEW, **SHAPING[name])
    before = dataclasses.replace(sampling, **{name: getattr(Sampling(), name)})

    def ends_of(ids: list[int]) -> tuple[int, ...]:
        return (plain(ids)[2],) if name == "min_tokens" else ()

    ids = first(lambda ids: shaped(ids, sampling, ends_of(ids)) != shaped(ids, before, ends_of(ids)))
    ends = ends_of(ids)
    want = shaped(ids, sampling, ends)
    if ends:
        want = [*itertools.takewhile(lambda token: token not in ends, want), *(ends if ends[0] in want else ())]
    done = await session.generate(ids, sampling, stop_token_ids=ends, ignore_eos=True)
    assert list(done.token_ids) == want


@anyio_test
@pytest.mark.parametrize("name", DRAWING)
async def test_lesson_18_options_that_narrow_a_draw_exclude_the_rest(session: Session, name: str) -> None:
    """Every token is among those that the option leaves, which without it is not so."""
    narrow = Sampling(temperature=1.0, **DRAWING[name])
    ids = prompt(1, 6)

    async def outside(sampling: Sampling) -> int:
        many = await session.generate(ids, sampling, n=8, seed=3, max_tokens=NEW, ignore_eos=True)
        assert len({done.token_ids for done in many}) > 4, "nothing is drawn"
        count = 0
        for done in many:
            for logits, token in zip(logits_along(ids, done.token_ids), done.token_ids, strict=True):
                # A logit next to the border may be on either side of it by rounding.
                near = np.where(np.arange(VOCAB) == token, logits + 1e-3, logits)
                count += plain_sampling.distribution(near, narrow)[token] == 0.0
        return count

    assert await outside(narrow) == 0
    assert await outside(Sampling(temperature=1.0)) > 10


@anyio_test
async def test_lesson_18_temperature_and_seed(session: Session) -> None:
    ids = prompt(2, 5)
    options: dict[str, Any] = {"max_tokens": NEW, "ignore_eos": True}
    one = await session.generate(ids, temperature=1.0, seed=1, **options)
    assert one.token_ids == (await session.generate(ids, temperature=1.0, seed=1, **options)).token_ids
    assert one.token_ids != (await session.generate(ids, temperature=1.0, seed=2, **options)).token_ids
    assert one.token_ids != (await session.generate(ids, temperature=2.0, seed=1, **options)).token_ids
    assert (await session.generate(ids, temperature=1e-5, seed=1, **options)).token_ids == plain(ids, NEW)


@anyio_test
async def test_lesson_18_n_gives_that_many_each_with_its_own_seed(session: Session) -> None:
    ids = prompt(3, 5)
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": NEW, "ignore_eos": True}
    several = await session.generate(ids, n=3, seed=40, **options)
    assert [done.token_ids for done in several] == [
        (await session.generate(ids, seed=seed, **options)).token_ids for seed in (40, 41, 42)
    ]
    assert len({done.token_ids for done in several}) == 3


@anyio_test
async def test_lesson_18_max_tokens_and_stop_tokens_end_it(session: Session) -> None:
    ids = prompt(4, 5)
    whole = plain(ids)
    for count in (1, 2, 7):
        assert (await session.generate(ids, max_tokens=count)).token_ids == whole[:count]
    end = whole[4]
    done = await session.generate(ids, max_tokens=NEW, stop_token_ids=(end, VOCAB - 1))
    assert done.token_ids == whole[: whole.index(end) + 1]
    assert done.finish_reason is FinishReason.STOP


@anyio_test
async def test_lesson_18_the_models_own_end_counts_unless_it_is_ignored(session: Session) -> None:
    (eos,) = MODEL.config.eos_token_ids
    ids, options = prompt(5, 5), {"max_tokens": NEW, "logit_bias": {eos: 1e9}}
    done = await session.generate(ids, **options)
    assert (done.token_ids, done.finish_reason) == ((eos,), FinishReason.EOS)
    ignored = await session.generate(ids, **options, ignore_eos=True)
    assert (ignored.token_ids, ignored.finish_reason) == ((eos,) * NEW, FinishReason.LENGTH)


@anyio_test
async def test_lesson_18_log_probabilities_are_those_of_the_model(session: Session) -> None:
    ids = prompt(6, 12)
    done = await session.generate(ids, max_tokens=NEW, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    scored = [*zip(logits_along(ids, done.token_ids), done.logprobs, strict=True)]
    scored += zip(logits_along(ids[:1], tuple(ids[1:])), done.prompt_logprobs, strict=True)
    assert [entry.token_id for entry in done.logprobs] == list(done.token_ids)
    assert [entry.token_id for entry in done.prompt_logprobs] == ids[1:]
    for logits, entry in scored:
        logprobs = np.log(_softmax(logits))
        assert entry.logprob == pytest.approx(logprobs[entry.token_id], abs=1e-3)
        top = np.sort(logprobs)[::-1][: len(entry.top_ids)]
        assert np.allclose(entry.top_logprobs, top, atol=1e-3)
        assert np.allclose(logprobs[list(entry.top_ids)], top, atol=1e-3)
    assert {len(entry.top_ids) for entry in done.logprobs} == {3}
    assert {len(entry.top_ids) for entry in done.prompt_logprobs} == {2}


@anyio_test
async def test_lesson_18_processors_see_the_logits_of_the_requests_that_name_them(session: Session) -> None:
    ids = prompt(7, 5)
    least = plain_tokens(MODEL, ids, NEW, lambda logits, output: int(np.argmin(logits)))[0]
    one, other = (
        await session.generate([ids, ids], max_tokens=NEW, ignore_eos=True, processors="least"),
        plain(ids, NEW),
    )
    assert [list(done.token_ids) for done in one] == [least, least]
    assert (await session.generate(ids, max_tokens=NEW, ignore_eos=True)).token_ids == other


@anyio_test
async def test_lesson_18_stop_strings_end_the_text() -> None:
    with opened(model=FakeModel()) as session:
        whole = await session.generate("hello", max_tokens=60)
        stop = whole.text[20:23]
        kept = await session.generate("hello", max_tokens=60, stop=[stop, "never"], include_stop=True)
        assert kept.text == whole.text[:23] and kept.stop_reason == stop
        done = await session.generate("hello", max_tokens=60, stop=[stop, "never"])
        assert (done.text, done.finish_reason) == (whole.text[: whole.text.index(stop)], FinishReason.STOP)


@anyio_test
async def test_lesson_18_priorities_decide_who_runs_first() -> None:
    config = dataclasses.replace(CONFIG, policy="priority", max_requests=1)
    order: list[int] = []
    with opened(config) as session:
        async with session.paused():
            handles = {rank: session.submit(f"{rank}", max_tokens=3, priority=rank) for rank in (1, 0, 3, -2, 2)}
            while (report := await session.step()) is not None:
                order += [
                    rank for rank, handle in handles.items() for row in report.rows if row.request_id == handle.id
                ]
        assert list(dict.fromkeys(order)) == [3, 2, 1, 0, -2]
        for rank, handle in handles.items():
            assert list((await handle).token_ids) == expected(f"{rank}", max_tokens=3)


@anyio_test
async def test_lesson_18_salt(session: Session) -> None:
    """Requests of one salt share cached pages, those of different salts share none; the tokens are the same."""
    ids = prompt(0, 40)
    done = [await session.generate(ids, max_tokens=2, salt=salt) for salt in (None, None, "a", "a", "b")]
    cached = [one.usage.cached_tokens for one in done]
    assert cached[0] == cached[2] == cached[4] == 0 and cached[1] == cached[3] > 0
    assert len({one.token_ids for one in done}) == 1


REFUSED: list[dict[str, Any]] = [
    {"priority": 1},  # a queue in order of arrival has no use for it
    {"processors": "nobody's"},
    {"n": 100_000},
    {"logit_bias": {100_000: 1.0}},
    {"stop_token_ids": (100_000,)},
    *({name: 1} for name in ("best_of", "guided_json", "response_format", "use_beam_search", "length_penalty")),
]


@anyio_test
@pytest.mark.parametrize("options", REFUSED, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("use", ["generate", "many", "submit", "admit", "stream"])
async def test_lesson_18_what_can_not_be_applied_raises_and_names_itself(options: dict[str, Any], use: str) -> None:
    async def call(session: Session) -> None:
        if use in ("generate", "many"):
            await session.generate("x" if use == "generate" else ["x", "y"], **options)
        elif use == "submit":
            await session.submit("x", **options)
        elif use == "admit":
            await (await session.admit("x", **options))
        else:
            async for _ in session.stream("x", **options):
                pytest.fail("it ran")

    with opened() as session:
        with pytest.raises(InvalidRequest) as caught:
            await call(session)
        assert caught.value.field == next(iter(options))


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weights / weights.sum()
