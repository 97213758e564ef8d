"""The rule of a shelf, by a virtual clock: who is loaded, who leaves, and that every caller gets a turn."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle._src.shelf.policy import (
    ModelRow,
    ModelState,
    ShelfLimits,
    Transition,
    admits,
    head_of_line,
    next_step,
    victims,
)

LOADED, SLEEPING, UNLOADED = ModelState.LOADED, ModelState.SLEEPING, ModelState.UNLOADED
ONE = ShelfLimits(max_loaded=1)


def row(name: str, state: ModelState = LOADED, **fields: Any) -> ModelRow:
    return ModelRow(name, state, **{"nbytes": 10, **fields})


def test_a_model_is_planned_before_others_leave_for_it() -> None:
    rows = [row("a"), row("b", UNLOADED, nbytes=None, waiting_since=1.0)]
    assert next_step(rows, ONE, 2.0)[:2] == (Transition.PLAN, "b")
    rows[1].nbytes = 10
    assert next_step(rows, ONE, 2.0)[:2] == (Transition.SLEEP, "a")
    assert next_step(rows, ShelfLimits(memory=19), 2.0)[:2] == (Transition.SLEEP, "a")
    assert next_step(rows, ShelfLimits(memory=20), 2.0)[:2] == (Transition.LOAD, "b")
    assert next_step(rows, ShelfLimits(memory=9), 2.0)[:2] == (Transition.REFUSE, "b")
    rows[1].state = SLEEPING
    assert next_step(rows, ShelfLimits(), 2.0)[:2] == (Transition.WAKE, "b")


def test_the_least_recently_used_sleeps_and_one_in_use_never_does() -> None:
    rows = [row("a", used_at=3.0), row("b", used_at=2.0), row("c", used_at=1.0, busy=True)]
    rows.append(row("d", UNLOADED, waiting_since=5.0))
    assert next_step(rows, ShelfLimits(max_loaded=3), 9.0)[:2] == (Transition.SLEEP, "b")
    assert next_step(rows, ShelfLimits(memory=30), 9.0)[:2] == (Transition.SLEEP, "b")
    rows[0].busy = rows[1].busy = True
    assert next_step(rows, ShelfLimits(max_loaded=3), 9.0).action is None
    assert [one.name for one in victims(rows[3], rows, ShelfLimits(memory=20))] == ["a", "b"]


def test_a_model_stays_as_long_as_its_loading_took() -> None:
    rows = [row("a", loaded_at=10.0, seconds=2.0), row("b", SLEEPING, waiting_since=10.0)]
    assert next_step(rows, ONE, 11.0) == (None, "", 12.0)
    assert next_step(rows, ONE, 12.0)[:2] == (Transition.SLEEP, "a")
    rows[0].seconds = 90.0  # it compiled
    assert next_step(rows, ONE, 11.0) == (None, "", 15.0)
    rows[0].busy = True
    assert admits(rows[0], rows, ONE, 69.0) and not admits(rows[0], rows, ONE, 70.0)


def test_a_busy_model_takes_requests_until_its_turn_ends_and_others_wait() -> None:
    rows = [row("a", loaded_at=10.0, seconds=2.0, busy=True), row("b", SLEEPING)]
    assert admits(rows[0], rows, ONE, 99.0), "nobody waits"
    rows[1].waiting_since = 11.0
    assert admits(rows[0], rows, ONE, 17.9) and not admits(rows[0], rows, ONE, 18.0)
    assert admits(rows[0], rows, ShelfLimits(max_loaded=2), 18.0), "there is room for both"
    assert not admits(rows[1], rows, ONE, 10.0), "it sleeps"
    other = row("c", used_at=1.0)
    assert admits(rows[0], [*rows, other], ShelfLimits(max_loaded=2), 18.0), "the idle one leaves, not this one"


def test_models_wait_in_the_order_of_their_first_request() -> None:
    rows = [row("a", busy=True), row("b", SLEEPING, waiting_since=3.0), row("c", UNLOADED, waiting_since=2.0, nbytes=1)]
    head = head_of_line(rows)
    assert head is not None and head.name == "c"
    # A small one that would fit does not overtake: what became free would never be enough for a large one.
    rows[2].nbytes = 90
    assert next_step(rows, ShelfLimits(memory=95), 9.0).action is None


def test_idle_models_are_unloaded_awake_or_asleep() -> None:
    rows = [row("a", used_at=1.0, busy=True), row("b", SLEEPING, used_at=2.0), row("c", used_at=3.0)]
    limits = ShelfLimits(idle_unload=60.0)
    assert next_step(rows, limits, 61.0) == (None, "", 62.0)
    assert next_step(rows, limits, 62.0)[:2] == (Transition.UNLOAD, "b")
    rows[1].state = UNLOADED
    assert next_step(rows, limits, 62.0) == (None, "", 63.0)
    rows[2].waiting_since = 5.0
    assert next_step(rows, limits, 99.0).action is None, "somebody waits for it"


def test_one_that_is_to_leave_does_so_when_its_requests_have_ended() -> None:
    rows = [row("a", busy=True, leaves_at=1.0), row("b", SLEEPING, leaves_at=9.0)]
    assert next_step(rows, ShelfLimits(), 2.0) == (None, "", 9.0) and admits(rows[0], rows, ShelfLimits(), 2.0)
    rows[0].shut = True
    assert not admits(rows[0], rows, ShelfLimits(), 2.0)
    rows[0].busy = False
    assert next_step(rows, ShelfLimits(), 2.0)[:2] == (Transition.UNLOAD, "a")
    assert next_step([rows[1]], ShelfLimits(), 9.0)[:2] == (Transition.UNLOAD, "b")


class Simulation:
    """A shelf by a virtual clock: requests that arrive, run for a while and end."""

    def __init__(self, sizes: list[int], limits: ShelfLimits, cost: float) -> None:
        self.rows = [ModelRow(f"m{number}", nbytes=size) for number, size in enumerate(sizes)]
        self.lines: dict[str, list[float]] = {one.name: [] for one in self.rows}
        self.running: dict[str, list[float]] = {one.name: [] for one in self.rows}  # when each ends
        self.limits, self.cost, self.now = limits, cost, 0.0
        self.waits: list[float] = []
        self.switches = 0

    def arrive(self, one: ModelRow, seconds: float) -> None:
        if admits(one, self.rows, self.limits, self.now) and not self.lines[one.name]:
            self.run(one, seconds, 0.0)
        else:
            self.lines[one.name].append(self.now)
            one.waiting_since = min(self.lines[one.name])

    def run(self, one: ModelRow, seconds: float, wait: float) -> None:
        self.waits.append(wait)
        self.running[one.name].append(self.now + seconds)
        one.busy, one.used_at = True, self.now

    def let_in(self, one: ModelRow, seconds: float) -> None:
        line, self.lines[one.name], one.waiting_since = self.lines[one.name], [], None
        for began in line:
            self.run(one, seconds, self.now - began)

    def settle(self, seconds: float) -> None:
        """Let requests end, and make every change that is due."""
        while True:
            for one in self.rows:
                self.running[one.name] = [end for end in self.running[one.name] if end > self.now]
                one.busy = bool(self.running[one.name])
            for one in self.rows:  # a rival may have found other room meanwhile
                if self.lines[one.name] and admits(one, self.rows, self.limits, self.now):
                    self.let_in(one, seconds)
            step = next_step(self.rows, self.limits, self.now)
            if step.action is None:
                return
            (one,) = [entry for entry in self.rows if entry.name == step.name]
            assert not one.busy, f"{step} of a model in use"
            match step.action:
                case Transition.SLEEP:
                    one.state = SLEEPING
                case Transition.UNLOAD:
                    one.state, one.leaves_at = UNLOADED, None
                case _:
                    self.now += self.cost
                    self.switches += 1
                    one.state, one.loaded_at, one.seconds = LOADED, self.now, self.cost
                    self.let_in(one, seconds)
            held = [entry.nbytes or 0 for entry in self.rows if entry.state is LOADED]
            assert sum(held) <= (self.limits.memory or 1 << 40)
            assert len(held) <= (self.limits.max_loaded or 1 << 40)


@given(
    st.lists(st.integers(1, 10), min_size=2, max_size=5), st.integers(10, 20),
    st.sampled_from([None, 1, 2]), st.randoms(use_true_random=False),
)  # fmt: skip
@settings(max_examples=60)
def test_every_request_is_answered_within_a_bounded_number_of_turns(
    sizes: list[int], memory: int, most: int | None, draw: random.Random
) -> None:
    seconds = 0.5
    simulation = Simulation(sizes, ShelfLimits(memory, most, draw.choice([None, 3.0])), cost=1.0)
    for _ in range(200):
        simulation.arrive(draw.choice(simulation.rows), seconds)
        simulation.now += draw.choice([0.0, 0.05, 0.4])
        simulation.settle(seconds)
    for _ in range(400):
        simulation.now += 0.5
        simulation.settle(seconds)
    assert len(simulation.waits) == 200 and not any(simulation.lines.values())
    # A turn is at most four loadings long, then what runs ends, and the next model is loaded.
    assert max(simulation.waits) <= len(sizes) * (4.0 + seconds + 1.0) + 1.0


@pytest.mark.parametrize("others", [1, 3])
def test_callers_that_never_pause_take_turns_and_half_of_the_time_is_theirs(others: int) -> None:
    simulation = Simulation([10] * (1 + others), ShelfLimits(max_loaded=1), cost=1.0)
    while simulation.now < 200.0:
        for one in simulation.rows:
            if not simulation.lines[one.name]:
                simulation.arrive(one, 0.1)
        simulation.now += 0.05
        simulation.settle(0.1)
    assert max(simulation.waits) <= (1 + others) * 5.2
    assert simulation.switches * simulation.cost <= simulation.now / 2
