"""Abort at every point of the life cycle, overlapped steps included, gives everything back exactly once.

Upstream: https://github.com/sgl-project/mini-sglang/pull/111
A request aborted while it finished in an overlapped step was freed twice.
"""

from __future__ import annotations

import random

import pytest

from helpers.fakes import EOS, FakeModel, make_request
from helpers.scheduling import LoopBuilder, NoReserve
from helpers.sessions import CONFIG, expected, opened
from helpers.thorough import by_default
from rekindle._src.core.records import FinishReason


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("moment", by_default(range(24), lambda moment: moment % 3 == 1))
def test_lesson_13_abort_at_any_moment(moment: int, depth: int) -> None:
    loop = LoopBuilder(pages=12, max_requests=3, max_tokens_per_step=10).queue(reserve=NoReserve()).loop()
    requests = [make_request(f"request number {index}", max_tokens=7) for index in range(5)]
    for request in requests:
        loop.submit(request)
    victims = requests[:4:2]
    for turn in range(24):
        if turn == moment:
            for victim in victims:
                loop.take(loop.scheduler.abort(victim.id))
                assert loop.scheduler.abort(victim.id) is None, "an end is reported once"
            loop.scheduler.check_integrity()
        plan = loop.scheduler.plan()
        if plan is not None:
            loop.in_flight.append(loop.runner.dispatch(plan))
        if loop.in_flight and (plan is None or len(loop.in_flight) > depth):
            loop.commit()
        loop.scheduler.check_integrity()
    loop.run()
    assert loop.pool.held == 0
    for request in requests:
        if loop.reason(request) is FinishReason.ABORTED:
            assert request in victims
            output = loop.output(request)
            assert output == (loop.model.generate(request, len(output)) if output else [])
        else:
            assert loop.output(request) == loop.model.generate(request)


def test_lesson_13_pages_return_only_with_the_last_step_in_flight() -> None:
    loop = LoopBuilder(pages=8, max_requests=1).loop()
    request = make_request("x" * 20, max_tokens=9)
    loop.submit(request)
    flights = []
    for _ in range(2):
        plan = loop.scheduler.plan()
        assert plan is not None
        flights.append(loop.runner.dispatch(plan))
    assert loop.scheduler.abort(request.id) is not None
    assert (loop.pool.held, loop.scheduler.statistics().leaving) == (3, 1)
    loop.scheduler.commit(loop.runner.fetch(flights[0]))
    assert loop.pool.held == 3
    assert loop.scheduler.commit(loop.runner.fetch(flights[1])) == ()
    assert (loop.pool.held, loop.scheduler.statistics().leaving) == (0, 0)
    assert not loop.scheduler.has_work


def test_lesson_13_aborts_race_steps_in_flight_and_new_occupants_are_untouched() -> None:
    dice = random.Random(5)
    with opened(CONFIG, step_seconds=0.0005, num_pages=80) as session:
        for round_ in range(12):
            handles = [session.submit(f"{round_} {i}", max_tokens=20) for i in range(24)]
            victims = dice.sample(range(24), 12)
            for victim in victims:
                handles[victim].cancel()
            for i, handle in enumerate(handles):
                if i not in victims:
                    assert list(handle.result_sync().token_ids) == expected(f"{round_} {i}", max_tokens=20)


def test_lesson_02_a_late_end_does_not_reach_the_slots_next_occupant() -> None:
    loop = LoopBuilder(max_requests=1, overlap=True, model=FakeModel(eos_rate=1.0)).loop()
    first = make_request("first", max_tokens=9)
    second = make_request("second", max_tokens=5, min_tokens=5)
    loop.submit(first)
    loop.submit(second)
    loop.run()
    assert loop.output(first) == [EOS]
    assert loop.output(second) == loop.model.generate(second) and len(loop.output(second)) == 5
