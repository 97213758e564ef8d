"""A sequence that began elsewhere goes on as after a preemption: the same tokens, counts and scores."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from helpers.fakes import EOS, FakeModel, make_request
from helpers.sessions import CONFIG, parts
from rekindle import FinishReason
from rekindle._src.core.records import Request, ResumeState, TokenEvent
from rekindle._src.core.report_kinds import LOGPROBS, PROMPT_LOGPROBS
from rekindle._src.dispatch.engine import Engine

PROMPT = "Once upon a time there was"


def run(request: Request, **options: Any) -> list[TokenEvent]:
    scheduler, runner = parts(CONFIG, **options)
    engine = Engine(scheduler, runner)
    engine.submit(request)
    events = [event for batch in iter(engine.turn, None) for event in batch]
    scheduler.check_integrity()
    return events


def joined(events: list[TokenEvent]) -> TokenEvent:
    whole = events[0]
    for event in events[1:]:
        whole = whole.merged_with(event)
    return whole


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 20},
        {"max_tokens": 20, "temperature": 1.0, "seed": 3},
        {"max_tokens": 20, "presence_penalty": 1.0, "min_tokens": 15},
        {"max_tokens": 20, "logprobs": 2, "prompt_logprobs": 1},
    ],
)
@pytest.mark.parametrize("made", [0, 1, 5, 19])
def test_it_goes_on_behind_what_it_has(options: dict[str, Any], made: int) -> None:
    model = FakeModel(eos_rate=0.1) if "min_tokens" in options else FakeModel()
    request = make_request(PROMPT, **options)
    whole = joined(run(request, model=model))
    assert whole.finish_reason in (FinishReason.LENGTH, FinishReason.EOS)
    if made >= len(whole.token_ids):
        pytest.skip("it ended before")
    scores = PROMPT_LOGPROBS.of(whole)
    scored = len(scores) if made else 3
    resumed = ResumeState(np.asarray(whole.token_ids[:made], np.int32), min(scored, len(scores)))
    rest = joined(run(dataclasses.replace(request, resumed=resumed), model=model))
    assert rest.token_ids == whole.token_ids[made:]
    assert LOGPROBS.of(rest) == LOGPROBS.of(whole)[made:]
    assert PROMPT_LOGPROBS.of(rest) == scores[resumed.scored :]
    assert rest.finish_reason == whole.finish_reason


def test_it_is_told_apart_in_the_counts() -> None:
    scheduler, runner = parts(CONFIG)
    engine = Engine(scheduler, runner)
    request = make_request(PROMPT, max_tokens=10)
    scheduler.submit(dataclasses.replace(request, resumed=ResumeState(np.asarray([65] * 4, np.int32))))
    while engine.turn() is not None:
        pass
    figures = scheduler.statistics()
    assert (figures.prompt_tokens, figures.generated_tokens) == (request.prompt_length, 6)
    assert figures.prefill_tokens == request.prompt_length + 4
    again = dataclasses.replace(request, id="again", resumed=ResumeState(np.asarray([65] * 9, np.int32)))
    scheduler.submit(again)
    while engine.turn() is not None:
        pass
    assert scheduler.statistics().cached_tokens <= request.prompt_length  # what it had generated is no prompt
    assert EOS > 0
