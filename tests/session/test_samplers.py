"""Samplers beyond top-p through a session: rows with options of their own in one step, with seeds, drafts and grammars,
after a preemption and a restart. None of them compiles a program once the first step with one has run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rekindle
from helpers import adapters
from helpers.small import TINY
from rekindle import tiny
from rekindle.models import load

pytestmark = pytest.mark.usefixtures("large_steps")
PROMPTS = ["Once upon a time there was a fire. Once upon a time there was", "a b a b a b a", "Who are you? Who are"]
SAMPLERS: list[dict[str, Any]] = [
    {"dry_multiplier": 0.8, "dry_allowed_length": 1, "temperature": 0},
    {"dry_multiplier": 2.0, "temperature": 0.9, "dry_sequence_breakers": ["b", "up"]},
    {"typical_p": 0.6}, {"top_n_sigma": 1.0}, {"xtc_probability": 0.6, "xtc_threshold": 0.05},
    {"dynatemp_range": 0.6, "temperature": 0.9}, {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.4},
    {"adaptive_target": 0.3}, {"samplers": ["temperature", "top_p", "top_k"], "top_p": 0.9, "top_k": 5},
    {"repetition_penalty": 1.2, "typical_p": 0.9, "min_p": 0.02, "samplers": ["penalties", "typ_p", "min_p"]},
]  # fmt: skip
ALL = [{"temperature": 1.1, "seed": number, "max_tokens": 24} | options for number, options in enumerate(SAMPLERS)]
PLAIN = [{"temperature": 0.0, "max_tokens": 24}, {"temperature": 0.8, "top_p": 0.9, "seed": 3, "max_tokens": 24}]


def tokens(session: rekindle.Session, *, together: bool = True) -> list[tuple[int, ...]]:
    """The tokens of every prompt with some of the options, and of plain requests among them."""
    calls = [(PROMPTS[number % 3], options) for number, options in enumerate([*ALL, *PLAIN])]
    if not together:
        return [session.generate_sync(prompt, **options).token_ids for prompt, options in calls]
    handles = [session.submit(prompt, **options) for prompt, options in calls]
    return [handle.result_sync().token_ids for handle in handles]


@pytest.fixture(scope="module")
def opened() -> Iterator[rekindle.Session]:
    with rekindle.open_sync("tiny", **TINY, drafts="none") as session:
        yield session


@pytest.fixture(scope="module")
def alone(opened: rekindle.Session) -> list[tuple[int, ...]]:
    """The tokens of each request alone."""
    return tokens(opened, together=False)


def test_rows_with_options_of_their_own_share_steps(opened: rekindle.Session, alone: list[tuple[int, ...]]) -> None:
    assert tokens(opened) == alone


@pytest.mark.thorough
def test_other_values_compile_nothing(opened: rekindle.Session, alone: list[tuple[int, ...]]) -> None:
    """Requests alone, whose steps are of one size; how many share a step depends on when they come in."""
    changed: list[dict[str, Any]] = [
        {"samplers": ["xtc", "temperature", "min_p"], "min_p": 0.3, "xtc_probability": 0.9, "temperature": 0.7},
        {"dry_multiplier": 1.0, "dry_sequence_breakers": ["fire"]},
    ]

    def made() -> set[str]:
        return {name for name in opened.stats().programs if "samplers" in name}

    opened.generate_sync(PROMPTS[0], max_tokens=4, **SAMPLERS[4])
    opened.generate_sync(PROMPTS[0], max_tokens=4, **SAMPLERS[0])
    before = made()
    for options in changed:
        opened.generate_sync(PROMPTS[0], max_tokens=4, **options)
    assert before and made() == before


def test_plain_rows_are_those_of_a_session_without_samplers(alone: list[tuple[int, ...]]) -> None:
    with rekindle.open_sync("tiny", **TINY, drafts="none") as session:
        greedy, drawn = (session.generate_sync(PROMPTS[(10 + n) % 3], **PLAIN[n]) for n in range(2))
        assert [greedy.token_ids, drawn.token_ids] == alone[-2:]
        assert not any("samplers" in name for name in session.stats().programs)


def test_samplers_change_the_text(opened: rekindle.Session, alone: list[tuple[int, ...]]) -> None:
    greedy = opened.generate_sync(PROMPTS[0], max_tokens=24).token_ids
    assert alone[0] != greedy
    drawn = opened.generate_sync(PROMPTS[2], temperature=1.1, seed=2, max_tokens=24).token_ids
    assert alone[2] != drawn


@pytest.mark.anyio
async def test_the_same_seed_gives_the_same_tokens_on_both_event_loops(alone: list[tuple[int, ...]]) -> None:
    async with rekindle.open("tiny", **TINY, drafts="none") as session:
        for number in (1, 6):
            done = await session.generate(PROMPTS[number % 3], **ALL[number])
            assert done.token_ids == alone[number]


def test_drafts_change_no_token(alone: list[tuple[int, ...]]) -> None:
    with rekindle.open_sync("tiny", **TINY, drafts="suffix") as session:
        assert tokens(session) == alone
        assert tokens(session, together=False) == alone
        assert session.stats().accepted_tokens > 0


@pytest.mark.anyio
async def test_numbers_that_are_carried_survive_sleep(alone: list[tuple[int, ...]]) -> None:
    """A session that sleeps preempts its requests: the state on the device is gone, and each enters a slot again."""
    async with rekindle.open("tiny", **TINY, drafts="none") as session:
        handle = session.submit(PROMPTS[6 % 3], **ALL[6])
        async for _ in handle:
            break
        await session.sleep()
        await session.wake()
        assert (await handle).token_ids == alone[6]


@pytest.mark.thorough
def test_a_restarted_session_finds_the_programs_and_draws_the_same(tmp_path: Path) -> None:
    options: dict[str, Any] = {**TINY, "max_requests": 2, "drafts": "none", "cache_dir": tmp_path}

    def run() -> tuple[list[tuple[int, ...]], int]:
        with rekindle.open_sync("tiny", **options) as session:
            texts = [session.generate_sync(PROMPTS[0], **ALL[number]).token_ids for number in (1, 4, 6)]
            return texts, session.stats().traces

    first, traced = run()
    again, traced_again = run()
    assert first == again
    assert traced > 0 == traced_again


@pytest.mark.thorough
def test_a_grammar_masks_before_samplers(opened: rekindle.Session) -> None:
    for number, options in enumerate(ALL):
        done = opened.generate_sync(PROMPTS[number % 3], **options | {"max_tokens": 40}, regex="(red|green|blue){3}")
        assert done.text.replace("red", "").replace("green", "").replace("blue", "") == "", options


def test_a_grammar_with_drafts_draws_the_same(opened: rekindle.Session) -> None:
    asked: dict[str, Any] = {"choice": ["once upon a time", "once upon a fire", "twice"]}
    expected = [opened.generate_sync(PROMPTS[0], **ALL[number] | asked).token_ids for number in (2, 4, 6)]
    with rekindle.open_sync("tiny", **TINY, drafts="suffix") as session:
        assert [session.generate_sync(PROMPTS[0], **ALL[number] | asked).token_ids for number in (2, 4, 6)] == expected


@pytest.mark.thorough
@pytest.mark.parametrize("drafts", ["none", "suffix"])
def test_rows_with_adapters_draw_as_they_do_alone(tmp_path: Path, drafts: str) -> None:
    """Two adapters and the base in one step, each with every sampler; one that keeps a single token is greedy."""
    config = load(tiny.folder()).config
    folders = {
        str(seed): adapters.write(tmp_path / str(seed), config, seed=seed, targets=["q_proj"]) for seed in (1, 2)
    }
    with rekindle.open_sync("tiny", **TINY, drafts=drafts, adapters=folders, max_adapters=2) as session:
        different = 0
        for number, options in enumerate(ALL):
            prompt, names = PROMPTS[number % 3], ("1", "2", None)
            alone = [session.generate_sync(prompt, **options, adapter=name).token_ids for name in names]
            handles = [session.submit(prompt, **options, adapter=name) for name in names * 2]
            assert [handle.result_sync().token_ids for handle in handles] == alone * 2, options
            different += len({*alone}) == 3
        one: dict[str, Any] = {"samplers": ["top_k", "temperature"], "top_k": 1, "temperature": 1.0, "seed": 1}
        for name in ("1", "2"):
            greedy = session.generate_sync(PROMPTS[0], temperature=0, max_tokens=24, adapter=name).token_ids
            assert session.generate_sync(PROMPTS[0], **one, max_tokens=24, adapter=name).token_ids == greedy
        assert different >= 5, "the adapters change little"
        assert drafts == "none" or session.stats().accepted_tokens > 0


def test_sampled_logprobs_are_of_the_tokens_that_are_left(opened: rekindle.Session) -> None:
    done = opened.generate_sync(
        PROMPTS[0],
        temperature=1.0,
        seed=1,
        max_tokens=6,
        samplers=["top_k"],
        top_k=3,
        logprobs=8,
        logprobs_of="sampled",
    )
    assert done.logprobs is not None
    for token in done.logprobs:
        finite = [value for value in token.top_logprobs if value > -1e30]
        assert len(finite) == 3
        assert token.logprob in finite


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"mirostat": 1}, "mirostat"), ({"samplers": ["top_q"]}, "samplers"), ({"typical_p": 0.0}, "typical_p"),
        ({"samplers": ["top_k", "top_k"]}, "samplers"), ({"samplers": ["adaptive_p", "xtc"]}, "samplers"),
        ({"samplers": 3}, "samplers"), ({"dry_base": 0.5}, "dry_base"),
        ({"dry_penalty_last_n": 5000}, "dry_penalty_last_n"),
        ({"dry_allowed_length": 10**400}, "dry_allowed_length"),
        ({"dry_sequence_breakers": ["\ud800"]}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"), ({"xtc_probability": 1.5}, "xtc_probability"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": ["abcdefghij" * 4] * 9}, "dry_sequence_breakers"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused_by_name(opened: rekindle.Session, options: dict[str, Any], field: str) -> None:
    with pytest.raises(rekindle.errors.InvalidRequest) as caught:
        opened.generate_sync("a", **options)
    assert caught.value.field == field
