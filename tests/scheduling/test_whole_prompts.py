"""Prompts of models whose tokens see those after them: each is computed in one step, and the oldest never starves."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from helpers.fakes import extended, make_request
from helpers.scheduling import Loop, LoopBuilder
from rekindle._src.capabilities.pooling.request import POOLED, PromptPooling
from rekindle._src.core.records import FinishReason, Request


def text(number: int, length: int, pooling: Any = "mean") -> Request:
    return extended(make_request("x" * length, id=f"r{number}"), PromptPooling(pooling))


def rows_of(loop: Loop) -> list[list[tuple[str, int, int]]]:
    """The rows of all steps until nothing is left: id, start and length."""
    steps = []
    while (plan := loop.scheduler.plan()) is not None:
        assert not plan.decode
        steps.append([(row.request.id, row.start, row.length) for row in plan.prefill])
        loop.in_flight.append(loop.runner.dispatch(plan))
        loop.commit()
    loop.scheduler.check_integrity()
    return steps


def test_a_prompt_waits_for_a_step_with_room_for_it_and_is_the_first_of_that() -> None:
    loop = LoopBuilder(max_tokens_per_step=32).steps(whole=True).cache(prefixes=False).loop()
    for number, length in enumerate((20, 10, 5, 32, 1)):
        loop.submit(text(number, length))
    steps = rows_of(loop)
    assert steps == [[("r0", 0, 20), ("r1", 0, 10)], [("r2", 0, 5)], [("r3", 0, 32)], [("r4", 0, 1)]]


@pytest.mark.parametrize("seed", range(6))
def test_any_load(seed: int) -> None:
    """Few pages and slots, aborts: every row is a whole prompt, steps keep to their budget, and they come in order."""
    choose = random.Random(seed)
    loop = (
        LoopBuilder(max_tokens_per_step=48, pages=12, max_requests=5, overlap=seed % 2 == 0)
        .steps(whole=True)
        .cache(prefixes=False)
        .loop()
    )
    lengths = [choose.randint(1, 48) for _ in range(120)]
    requests = [text(number, length, choose.choice(("mean", "last", "cls"))) for number, length in enumerate(lengths)]
    aborted = set(choose.sample(range(120), 15))
    waiting, seen = list(enumerate(requests)), list[tuple[str, int, int]]()
    while waiting or loop.scheduler.has_work:
        for number, request in waiting[: choose.randint(0, 9)]:
            loop.submit(request)
            waiting.pop(0)
            if number in aborted:
                loop.take(loop.scheduler.abort(request.id))
        plan = loop.scheduler.plan()
        if plan is not None:
            assert sum(row.length for row in plan.prefill) <= 48
            seen += [(row.request.id, row.start, row.length) for row in plan.prefill]
            loop.in_flight.append(loop.runner.dispatch(plan))
        while loop.in_flight and (plan is None or choose.random() < 0.7):
            loop.commit()
    loop.scheduler.check_integrity()
    kept = [number for number in range(120) if number not in aborted]
    assert seen == [(f"r{number}", 0, lengths[number]) for number in kept]
    for number in kept:
        assert loop.reason(requests[number]) is FinishReason.LENGTH
        (pooled,) = [vector for event in loop.events[f"r{number}"] for vector in POOLED.of(event)]
        assert np.all(np.isfinite(pooled))
