"""A small model that drafts, over the fake device: what it keeps at the ids of pages, and when it rests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.fakes import FakeModel
from helpers.scheduling import Loop, LoopBuilder, exact, make_request, text
from rekindle._src.core.records import DraftTask, StepPlan
from rekindle._src.drafts import resting
from rekindle._src.drafts.model import ModelDrafter
from rekindle._src.scheduling.drafting.costs import StepCosts
from rekindle._src.scheduling.ready_rows import StepProgramsLike
from scheduling.test_ready_rows import Programs

SIZE = 8


class SmallModel:
    """Does the tasks of steps as a device would: it knows of a text only what lies in the pages."""

    def __init__(self, loop: Loop, *, pages: int, salt: int = 0) -> None:
        self._model, self._memory = FakeModel(salt=salt), np.zeros((pages, SIZE), np.uint64)
        self.tokens = 0  # that it computed
        self.plans: list[StepPlan] = []
        dispatch = loop.runner.dispatch

        def with_tasks(plan: StepPlan) -> Any:
            self.plans.append(plan)
            for task in plan.tasks:
                self._do(task)
            return dispatch(plan)

        loop.runner.dispatch = with_tasks  # type: ignore[method-assign]

    def _do(self, task: DraftTask) -> None:
        self.tokens += len(task.tokens)
        places = np.arange(len(task.pages) * SIZE)
        flat = self._memory[task.pages[places // SIZE], places % SIZE]
        values = [*flat[: task.start]]
        inputs = task.tokens.tolist()
        for row in task.drafts:
            values += self._model.extend(np.array(values, np.uint64), inputs).tolist()
            token = self._model.choose(np.array(values, np.uint64), task.request.sampling, 0, frozenset())
            assert row.token_ids is not None
            row.token_ids[0] = token
            inputs = [token]
        if not task.drafts:
            values += self._model.extend(np.array(values, np.uint64), inputs).tolist()
        written = places[task.start : len(values)]
        self._memory[task.pages[written // SIZE], written % SIZE] = values[task.start :]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains))
    monkeypatch.setattr(resting, "PLAIN_STEPS", 0)


def small(
    *, salt: int = 0, pages: int = 60, programs: StepProgramsLike | None = None
) -> tuple[Loop, SmallModel, ModelDrafter]:
    drafter = ModelDrafter(SIZE, 1000)
    builder = LoopBuilder(max_requests=6, pages=pages, page_size=SIZE).drafts(drafters=[drafter])
    loop = builder.steps(programs=programs).loop()
    return loop, SmallModel(loop, pages=pages + 1, salt=salt), drafter


def run(loop: Loop, *prompts: list[int], **options: Any) -> None:
    requests = [make_request(prompt, max_tokens=40, eos_ids=(), **options) for prompt in prompts]
    for request in requests:
        loop.submit(request)
    loop.run()
    exact(loop, *requests)


@pytest.mark.usefixtures("eager")
def test_all_drafts_are_right_where_it_says_the_same() -> None:
    """After cached pages, in forks, after preemptions, where pages were given to other texts, and when it lost all."""
    loop, device, drafter = small(pages=30)
    for number in range(4):
        run(loop, text(50, number), text(50, number, 4, 5), text(20, 7, number), temperature=1.0, seed=number)
        run(loop, *[[number, index, *range(30)] for index in range(5)])
        if number == 2:
            drafter.lost()
            device._memory[:] = 0
    statistics = loop.scheduler.statistics()
    assert statistics.preemptions > 0
    assert statistics.drafted_tokens > 100
    # Those after the last token of a request are not counted as accepted.
    assert statistics.accepted_tokens == statistics.drafted_tokens


@pytest.mark.usefixtures("eager")
def test_shared_pages_are_computed_once() -> None:
    loop, device, _ = small()
    run(loop, text(160, 1))
    before = device.tokens
    run(loop, text(160, 2))
    assert device.tokens - before < 70


def test_it_rests_while_its_drafts_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "PLAIN_STEPS", 0)
    loop, device, drafter = small(salt=1)
    for number in range(8):
        run(loop, text(9, number), temperature=1.0, seed=number)
    assert loop.scheduler.statistics().drafted_tokens < 60
    assert not drafter.awake
    assert device.tokens < 400


@pytest.mark.usefixtures("eager")
def test_one_request_whose_drafts_do_not_pay_rests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one after it has drafts from its beginning; after several of them in a row the drafter rests."""
    loop, device, drafter = small()
    pays = [False]
    monkeypatch.setattr(StepCosts, "best", lambda self, rows, gains, free, measured=True: len(gains) * pays[0])
    run(loop, text(9, 1), temperature=1.0, seed=1)
    before = loop.scheduler.statistics()
    assert not before.drafted_tokens and drafter.awake
    pays[0] = True
    run(loop, text(9, 2), temperature=1.0, seed=2)
    assert loop.scheduler.statistics().accepted_tokens > 20
    pays[0] = False
    run(loop, *(text(9, number) for number in range(3, 6)), temperature=1.0, seed=3)
    assert not drafter.awake
    asking = [len(plan.awaited) for plan in device.plans]
    assert max(asking) == 3
    tried = len(device.plans)
    for number in range(6, 12):
        run(loop, *(text(9, number, place) for place in range(3)), temperature=1.0, seed=3)
    asking = [len(plan.awaited) for plan in device.plans[tried:]]
    assert max(asking) == 1, "it tries with one request"


@pytest.mark.usefixtures("eager")
def test_a_pause_does_not_grow_while_the_program_for_drafts_is_made() -> None:
    programs = Programs(most=1)
    programs.make("plain")
    loop, _, drafter = small(programs=programs)
    run(loop, text(9, 1), temperature=1.0, seed=1)
    assert programs.rows > 1, "drafts asked for it"
    assert not loop.scheduler.statistics().drafted_tokens
    assert drafter.pause == resting.SHORTEST_PAUSE


@pytest.mark.usefixtures("eager")
def test_a_full_batch_does_not_wait_for_drafts() -> None:
    """There is no room for any, so that its steps are planned ahead."""
    loop, device, drafter = small()
    requests = [make_request(text(9, number), max_tokens=40, eos_ids=()) for number in range(6)]
    for request in requests:
        loop.submit(request)
    for _ in range(20):
        loop.step()
    assert drafter.awake and drafter.crowded
    latest = device.plans[-1]
    assert len(latest.decode) == 6 and not latest.awaited
    loop.run()
    exact(loop, *requests)
    for number in range(2):
        run(loop, text(30, number))
    assert loop.scheduler.statistics().accepted_tokens > 20, "there is room again"
