"""Sessions with `prompt_lookup`: what comes back is what comes back without, in fewer steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.fakes import EchoModel
from helpers.sessions import CONFIG, expected, opened
from helpers.small import opening, prompt
from helpers.thorough import one_event_loop  # noqa: F401  the fixture
from rekindle import Session
from rekindle._src.core.records import FinishReason
from rekindle.errors import ConfigError

ECHO = EchoModel(alphabet=tuple(range(97, 123)))
GUESSING = dataclasses.replace(CONFIG, prompt_lookup=4)
anyio_test = pytest.mark.anyio


@pytest.fixture
def guessing() -> Iterator[Session]:
    with opened(GUESSING, model=ECHO) as made:
        yield made


@anyio_test
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_tokens_text_and_logprobs_are_the_same_in_fewer_steps(guessing: Session, temperature: float) -> None:
    options: dict[str, Any] = {"max_tokens": 80, "temperature": temperature, "seed": 3}
    streamed = [delta async for delta in guessing.stream("hello ", logprobs=0, **options)]
    tokens = [token for delta in streamed for token in delta.token_ids]
    assert tokens == expected("hello ", ECHO, **options)
    assert "".join(delta.text for delta in streamed) == bytes(tokens).decode()
    assert [entry.token_id for delta in streamed for entry in delta.logprobs] == tokens
    assert max(len(delta.token_ids) for delta in streamed) > 2, "what a step brings comes as one delta"
    stats = guessing.stats()
    assert stats.steps < 65
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.generated_tokens == 80


@pytest.mark.thorough
@anyio_test
async def test_several_of_a_prompt_and_several_prompts(guessing: Session) -> None:
    drawn: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0}
    several = await guessing.generate("hello ", n=3, seed=5, **drawn)
    assert [list(done.token_ids) for done in several] == [
        expected("hello ", ECHO, seed=seed, **drawn) for seed in (5, 6, 7)
    ]
    many = await guessing.generate([f"{index}, hello " for index in range(12)], max_tokens=40)
    assert [list(done.token_ids) for done in many] == [
        expected(f"{index}, hello ", ECHO, max_tokens=40) for index in range(12)
    ]


@pytest.mark.thorough
@anyio_test
async def test_a_stop_string_amid_what_was_guessed_ends_the_text(guessing: Session) -> None:
    whole = (await guessing.generate("hello ", max_tokens=80)).text
    for at in range(20, 60, 3):
        stop = whole[at : at + 3]
        done = await guessing.generate("hello ", max_tokens=80, stop=stop)
        assert done.text == whole[: whole.index(stop)]
        assert done.finish_reason is FinishReason.STOP


@anyio_test
async def test_cancelling_gives_everything_back(guessing: Session) -> None:
    for length in (1, 5, 20):
        async for delta in guessing.stream("hello ", max_tokens=400):
            length -= len(delta.token_ids)
            if length <= 0:
                break


@pytest.mark.thorough
@anyio_test
async def test_single_steps_show_what_was_guessed(guessing: Session) -> None:
    async with guessing.paused():
        handle = guessing.submit("hello hello hello ", max_tokens=60)
        reports = []
        while (report := await guessing.step()) is not None:
            reports.append(report)
    rows = [row for report in reports for row in report.rows]
    guessed = [row for row in rows if row.kind == "draft"]
    assert [row.token_id for row in rows if row.token_id is not None] == list((await handle).token_ids)
    assert len(guessed) == guessing.stats().drafted_tokens
    assert sum(row.token_id is not None for row in guessed) == guessing.stats().accepted_tokens
    assert [row.finish_reason for row in rows].count(FinishReason.LENGTH) == 1
    shown = [str(report) for report in reports if any(row in guessed for row in report.rows)]
    assert any(f"draft   {handle.id}" in text and "in vain" in text for text in shown)
    assert "draft tokens were accepted" in str(guessing.explain(handle))
    assert "in vain" in "".join(report._repr_html_() for report in reports)


@pytest.mark.thorough
@anyio_test
async def test_a_real_model_with_few_tokens_to_choose_from_compiles_nothing() -> None:
    """The same with the option and without: greedy and drawn, from a model in float32."""
    requests: list[dict[str, Any]] = [
        {"logit_bias": dict.fromkeys((20, 21, 22), 60.0), "temperature": temperature, "seed": 4, "logprobs": 1}
        for temperature in (0.0, 0.0, 1.0, 5.0)
    ]
    outputs = []
    for guessed in (0, 3):
        async with opening(prompt_lookup=guessed) as session:
            before = session.stats()
            handles = [
                session.submit(prompt(index, 6), max_tokens=50, ignore_eos=True, **options)
                for index, options in enumerate(requests)
            ]
            outputs.append([(await handle).token_ids for handle in handles])
            alone = [await session.generate(prompt(9, 4), max_tokens=50, ignore_eos=True, **requests[2])]
            outputs[-1].append(alone[0].token_ids)
            stats = session.stats()
            assert (stats.traces, stats.compilations) == (before.traces, before.compilations)
            session.check_integrity()
    assert outputs[0] == outputs[1]
    assert stats.accepted_tokens > 0


@anyio_test
async def test_more_guesses_than_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_requests=4") as caught:
        await opening(prompt_lookup=4)
    assert caught.value.field == "prompt_lookup"


@anyio_test
async def test_statistics_say_what_each_drafter_has_brought() -> None:
    config = dataclasses.replace(CONFIG, drafts="suffix")
    with opened(config, model=ECHO) as session:
        assert session.stats().drafters == {} and "drafts" not in str(session.stats())
        for _ in range(2):
            await session.generate("hello ", max_tokens=60)
        stats = session.stats()
    counts = stats.drafters["suffix"]
    assert (counts.drafted, counts.accepted) == (stats.drafted_tokens, stats.accepted_tokens)
    assert f"{counts.accepted} of {counts.drafted} accepted" in str(stats)
    assert f"suffix: {counts.accepted} of {counts.drafted} accepted" in stats._repr_html_()
