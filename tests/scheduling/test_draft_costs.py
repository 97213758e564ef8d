"""How many drafts a step gets: as many as bring more tokens a second than none would, by measured times."""

from __future__ import annotations

import random

from rekindle._src.core.records import StepPlan, StepResult
from rekindle._src.scheduling.drafting.costs import StepCosts

PLAN = StepPlan(0, (), ())


def result(seconds: float) -> StepResult:
    return StepResult(PLAN, (), device_seconds=0.75 * seconds, idle_seconds=0.25 * seconds)


def measured(running: dict[int, float], waiting: dict[int, float]) -> StepCosts:
    costs = StepCosts()
    for _ in range(8):
        for times, waited in ((running, False), (waiting, True)):
            for rows, seconds in times.items():
                costs.learn(rows, result(seconds), waited=waited)
    return costs


def test_before_anything_is_measured_drafts_have_to_bring_half_a_token_for_each_row() -> None:
    costs = StepCosts()
    assert costs.best(1, [0.5, 0.2, 0.1], 7) == 3
    assert costs.best(1, [0.3, 0.1], 7) == 0
    assert costs.best(4, [0.9, 0.5, 0.4, 0.1, 0.1], 4) == 0
    assert costs.best(4, [0.9, 0.7, 0.4, 0.1, 0.1], 4) == 4, "no more than are free"


def test_before_the_wait_is_measured_it_is_taken_for_a_whole_step() -> None:
    costs = measured({1: 1.0, 4: 1.0}, {})
    assert costs.best(1, [0.9, 0.8, 0.7], 7) == 3
    assert costs.best(4, [0.9] * 4, 4) == 4, "one is tried"
    assert costs.best(4, [0.9] * 4, 4) == 0, "and the next one not before some time"


def test_a_cheap_wait_lets_few_likely_drafts_pay() -> None:
    costs = measured({1: 1.0, 4: 1.0, 8: 1.1}, {2: 1.05})
    assert costs.best(4, [0.9], 4) == 1
    assert costs.best(4, [0.3], 4) == 0, "and unlikely ones none"
    assert costs.best(4, [0.9, 0.9, 0.9, 0.9], 4) == 4


def test_an_expensive_wait_lets_none_pay() -> None:
    costs = measured({4: 1.0}, {8: 3.0})
    assert costs.best(4, [1.0] * 4, 4) == 0
    assert costs.best(1, [1.0] * 7, 7) == 7, "8 tokens for three steps"
    assert costs.best(1, [0.25] * 7, 7) == 0


def test_the_likeliest_are_computed_and_others_are_not_where_each_row_costs() -> None:
    """A row more takes a fifth of a step."""
    running = {rows: 1.0 + 0.2 * (rows - 1) for rows in range(1, 9)}
    costs = measured(running, {rows: seconds + 0.1 for rows, seconds in running.items()})
    assert costs.best(1, [0.9, 0.8, 0.7, 0.1, 0.05], 7) == 3


def test_a_program_that_was_compiled_once_is_no_usual_time() -> None:
    costs = measured({1: 1.0}, {})
    for seconds in (90.0, 1.2, 1.2, 1.2, 1.2, 1.2):
        assert costs.best(1, [0.9] * 3, 7) == 3
        costs.learn(4, result(seconds), waited=True)
    assert costs.best(1, [0.5, 0.4], 7) == 2, "a step of 4 takes 1.2"


def test_outdated_times_are_measured_again() -> None:
    costs = measured({1: 1.0}, {4: 50.0})
    assert costs.best(1, [0.9] * 3, 7) == 0
    for _ in range(3000):
        costs.learn(1, result(1.0), waited=False)
    assert costs.best(1, [0.9] * 3, 7) == 3


def test_no_choice_is_worse_than_none_by_more_than_the_noise() -> None:
    """Random times and chances: the gain that was counted on is there, if the times are."""
    rng = random.Random(3)
    for _ in range(200):
        step, row, wait = 1.0, rng.choice([0.0, 0.05, 0.3]), rng.choice([0.05, 0.3, 1.0, 2.0])
        running = {rows: step + row * rows for rows in range(1, 17)}
        waiting = {rows: seconds + wait for rows, seconds in running.items()}
        costs, rows = measured(running, waiting), rng.randrange(1, 9)
        gains = sorted((rng.random() for _ in range(8)), reverse=True)
        count = costs.best(rows, gains, 8)
        rate = (rows + sum(gains[:count])) / (waiting if count else running)[rows + count]
        assert rate >= rows / running[rows]
        best = max((rows + sum(gains[:many])) / waiting[rows + many] for many in range(1, 9))
        assert rate >= 0.95 * best
