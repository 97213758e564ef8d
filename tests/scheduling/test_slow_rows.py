"""Rows of slow grammars wait for their turn, whatever one step or one token took, and others are not held up."""

from __future__ import annotations

import numpy as np

from helpers.fakes import make_request
from helpers.guides import RuleGuide, letters
from rekindle._src.capabilities.guides.guidance import GUIDED
from rekindle._src.core.records import FinishReason, GuideReport, Row, RowResult, StepPlan, StepResult
from rekindle._src.scheduling.sequence import Sequence
from rekindle._src.scheduling.slow_rows import ORDINARY, SlowRows

STEP = 0.001


class Steps:
    """Steps of so many guided rows and a free one."""

    def __init__(self, guided: int) -> None:
        self.slow = SlowRows()
        self.guided = [self.sequence(f"g{number}", RuleGuide(letters)) for number in range(guided)]
        self.sequences = [*self.guided, self.sequence("free", None)]

    @staticmethod
    def sequence(name: str, guide: RuleGuide | None) -> Sequence:
        return Sequence(make_request("x", id=name, guide=guide), 0, 100, FinishReason.LENGTH, 16)

    def run(self, told: GuideReport, seconds: float = STEP) -> int:
        """Run a step, of which each guide says the same; returns how many guided rows were in it."""
        running, waiting = self.slow.split(self.sequences)
        assert self.sequences[-1] in running and len(running) + len(waiting) == len(self.sequences)
        rows = []
        for sequence in running:
            guided = told if sequence.extensions.costly is not None else None
            if sequence.extensions.costly is not None:
                sequence.extensions.costly.add(told)
            rows.append(RowResult(sequence.id, 0, 1, {} if guided is None else {GUIDED.name: (guided,)}))
        pages = np.zeros(1, np.int32)
        plan = StepPlan(0, tuple(Row(one.request, 1, 0, 0, 1, pages, None, samples=True) for one in running), ())
        self.slow.learn(running, StepResult(plan, tuple(rows), seconds=seconds))
        return len(running) - 1


def test_ordinary_grammars_always_run() -> None:
    steps = Steps(64)
    assert [steps.run(GuideReport(seconds=0.9 * ORDINARY)) for _ in range(50)] == [64] * 50


def test_a_token_that_takes_long_makes_no_grammar_slow_for_long() -> None:
    steps = Steps(16)
    for _ in range(20):
        steps.run(GuideReport(seconds=ORDINARY / 4))
    for _ in range(3):
        steps.guided[0].extensions.costly.add(GuideReport(seconds=10 * ORDINARY))  # type: ignore[union-attr]
        made = [steps.run(GuideReport(seconds=ORDINARY / 4)) for _ in range(12)]
        assert min(made) >= 15 and made[-1] == 16, made


def test_slow_ones_take_a_quarter_of_a_step_and_a_fifth_of_the_time() -> None:
    steps, slow = Steps(15), 5 * ORDINARY
    made = [steps.run(GuideReport(seconds=slow)) for _ in range(400)][100:]
    assert 0 < sum(made) * slow <= (0.25 + 0.25) * STEP * len(made), made


def test_a_step_that_was_held_up_does_not_let_slow_grammars_in() -> None:
    calm, held_up = Steps(15), Steps(15)
    for number in range(300):
        calm.run(GuideReport(seconds=5 * ORDINARY))
        held_up.run(GuideReport(seconds=5 * ORDINARY), seconds=0.1 if number == 150 else STEP)
    assert held_up.slow.allowed < 1.1 * calm.slow.allowed, "it was 100 ms, once"


def test_steps_whose_grammars_are_slow_show_how_long_steps_take_too() -> None:
    steps = Steps(15)
    for _ in range(100):
        steps.run(GuideReport(seconds=5 * ORDINARY), seconds=10 * STEP)
    assert steps.slow.allowed > 2 * STEP
    for _ in range(100):
        steps.run(GuideReport(seconds=5 * ORDINARY))
    assert steps.slow.allowed < STEP / 2


def test_looking_for_an_end_waits_for_its_turn_and_is_no_usual_time() -> None:
    steps = Steps(8)
    for _ in range(20):
        steps.run(GuideReport(seconds=ORDINARY / 4))
    due = GuideReport(seconds=ORDINARY / 4, due=100 * ORDINARY)
    assert steps.run(due) == 8, "it is told with a token"
    looked = GuideReport(seconds=100 * ORDINARY, searched=99.75 * ORDINARY, due=100 * ORDINARY)
    made = [steps.run(looked) for _ in range(8)]
    assert max(made) == 1, "together they would hold up all others"
    made = [steps.run(GuideReport(seconds=ORDINARY / 4)) for _ in range(2000)]
    assert made[-1] == 8, "when it is over they are as quick as before"
