"""Steps that the device repeats: how many, for whom, and what of them becomes a part of texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

import pytest

from helpers.fakes import EOS, FakeModel, make_request
from helpers.scheduling import Loop, LoopBuilder, exact
from rekindle._src.core.records import DraftTask, EntryLag, FinishReason, Row, StepPlan, StepResult
from rekindle._src.scheduling.drafting.drafter import Drafter
from rekindle._src.scheduling.page_ledger import PageLedger
from rekindle._src.scheduling.repeats import Repeats
from rekindle._src.scheduling.sequence import Limits, Sequence
from scheduling.test_ready_rows import Program, Programs


def loop_of(*, repeated: int = 8, model: FakeModel | None = None, **sizes: Any) -> Loop:
    return LoopBuilder(model=model or FakeModel(), **sizes).steps(repeated=repeated).loop()


def counts(loop: Loop) -> list[int]:
    """The steps of each dispatch."""
    return [plan.steps for plan in loop.runner.plans]


@pytest.mark.parametrize("most", [1, 3, 8])
def test_one_stream_needs_a_dispatch_for_as_many_tokens_as_it_may(most: int) -> None:
    """The first token comes with the prompt, and the step after it was planned while that ran."""
    loop, request = loop_of(repeated=most), make_request("a prompt", max_tokens=26)
    loop.submit(request)
    loop.run()
    exact(loop, request)
    assert counts(loop) == {1: [1] * 26, 3: [1, *[3] * 8, 1], 8: [1, 8, 8, 8, 1]}[most]


def test_each_token_is_an_event_of_its_own_in_order() -> None:
    loop, requests = loop_of(), [make_request(f"prompt {number}", max_tokens=20) for number in range(3)]
    for request in requests:
        loop.submit(request)
    loop.run()
    exact(loop, *requests)
    for request in requests:
        events = loop.events[request.id]
        assert [len(event.token_ids) for event in events] == [1] * 20
        assert [event.finish_reason for event in events] == [None] * 19 + [FinishReason.LENGTH]
    assert max(counts(loop)) == 8


def test_the_shortest_of_several_bounds_the_steps() -> None:
    loop = loop_of()
    short, long = make_request("short", max_tokens=5), make_request("long", max_tokens=30)
    for request in (short, long):
        loop.submit(request)
    loop.run()
    exact(loop, short, long)
    both = [plan for plan in loop.runner.plans if len(plan.first_decode) == 2]
    assert max(plan.steps for plan in both) == 4
    assert max(counts(loop)) == 8


class EntriesOfEachStep(Drafter):
    """Proposes nothing, and has each step compute the entries of its tokens while it is awake."""

    name = "entries"

    def __init__(self) -> None:
        self.computes = True
        self.rows = 0

    def begin(self, sequence: Sequence) -> None:
        return None

    def tasks(self, sequences: Items[Sequence], rows: Items[Row]) -> tuple[DraftTask, ...]:
        return ()

    def entries(self, sequences: Items[Sequence], rows: Items[Row], *, enters: bool) -> Mapping[int, EntryLag] | None:
        self.rows += len(rows)
        return {row.slot: EntryLag(0) for row in rows} if self.computes else None


def test_steps_that_compute_the_entries_of_a_drafter_are_not_repeated() -> None:
    """A program of several steps computes none, and they would count as computed."""
    drafter, request = EntriesOfEachStep(), make_request("a prompt", max_tokens=40)
    loop = LoopBuilder(model=FakeModel()).steps(repeated=8).drafts(drafters=[drafter]).loop()
    loop.submit(request)
    for _ in range(12):
        loop.step()
    assert set(counts(loop)) == {1} and drafter.rows == len(counts(loop))
    drafter.computes = False
    loop.run()
    exact(loop, request)
    assert max(counts(loop)) == 8


def test_a_newcomer_waits_for_one_dispatch() -> None:
    """Nothing is planned after repeated steps until they are committed; then the prompt comes first."""
    loop, running = loop_of(), make_request("it runs", max_tokens=200)
    loop.submit(running)
    while 8 not in counts(loop):
        plan = loop.scheduler.plan()
        if plan is None:
            loop.commit()
        else:
            loop.in_flight.append(loop.runner.dispatch(plan))
    assert [in_flight.plan.steps for in_flight in loop.in_flight][-1] == 8
    newcomer = make_request("a newcomer", max_tokens=4)
    loop.submit(newcomer)
    while loop.in_flight:
        assert loop.scheduler.plan() is None
        loop.commit()
    plan = loop.scheduler.plan()
    assert plan is not None and plan.steps == 1
    assert [row.request.id for row in plan.prefill] == [newcomer.id]
    loop.in_flight.append(loop.runner.dispatch(plan))
    loop.run()
    exact(loop, running, newcomer)


def test_while_a_request_waits_for_a_slot_steps_are_single() -> None:
    loop = loop_of(max_requests=1)
    requests = [make_request(f"one of {number}", max_tokens=20) for number in range(2)]
    for request in requests:
        loop.submit(request)
    loop.run()
    exact(loop, *requests)
    of = [{row.request.id for row in plan.rows} for plan in loop.runner.plans]
    single = [plan.steps for plan, ids in zip(loop.runner.plans, of, strict=True) if requests[0].id in ids]
    assert set(single) == {1}
    assert max(counts(loop)) == 8  # of the second one, once it is alone


@pytest.mark.parametrize(("options", "most"), [({"stop": ("never",)}, 1), ({"stop_ids": (EOS + 1,)}, 8), ({}, 8)])
def test_a_stop_string_keeps_steps_single_and_ids_do_not(options: dict[str, Any], most: int) -> None:
    """A stop string is found in the text, on the host."""
    loop, request = loop_of(), make_request("some prompt", max_tokens=20, **options)
    loop.submit(request)
    loop.run()
    exact(loop, request)
    assert max(counts(loop)) == most


@pytest.mark.parametrize("seed", range(6))
def test_what_follows_an_end_is_neither_delivered_nor_cached(seed: int) -> None:
    """The pages hold what was computed beyond the end; the tree has the tokens of the text alone."""
    model = FakeModel(eos_rate=0.08)
    loop, request = loop_of(model=model, page_size=2), make_request(f"prompt {seed}", max_tokens=60)
    loop.submit(request)
    loop.run()
    exact(loop, request)
    output = loop.output(request)
    assert loop.reason(request) is (FinishReason.EOS if output[-1] == EOS else FinishReason.LENGTH)
    statistics = loop.scheduler.statistics()
    assert statistics.generated_tokens == len(output)
    known = request.prompt_length + len(output) - 1  # the last token's keys are never computed
    assert statistics.pages_held == 0 and statistics.pages_cached <= -(-known // 2)
    again = make_request([*request.token_ids.tolist(), *output[:-1], 1], max_tokens=4)
    loop.submit(again)
    loop.run()
    exact(loop, again)


def test_a_cancelled_request_gets_nothing_of_the_steps_in_flight() -> None:
    loop = loop_of()
    cancelled, other = make_request("cancelled", max_tokens=90), make_request("other", max_tokens=40)
    for request in (cancelled, other):
        loop.submit(request)
    while not (loop.in_flight and loop.in_flight[-1].plan.steps == 8):
        plan = loop.scheduler.plan()
        if plan is None:
            loop.commit()
        else:
            loop.in_flight.append(loop.runner.dispatch(plan))
    before = loop.output(cancelled)
    loop.take(loop.scheduler.abort(cancelled.id))
    loop.scheduler.check_integrity()
    loop.run()
    assert loop.output(cancelled) == before
    assert loop.reason(cancelled) is FinishReason.ABORTED
    exact(loop, other)
    assert loop.scheduler.statistics().pages_held == 0


def test_steps_stay_within_the_pages_that_can_be_taken_without_harm() -> None:
    """A page is taken ahead only while each slot could take one, too: no request is preempted for it."""
    plenty = loop_of(page_size=4, pages=64)
    scarce = loop_of(page_size=4, pages=9)
    for loop in (plenty, scarce):
        request = make_request("abcd", max_tokens=30)
        loop.submit(request)
        loop.run()
        exact(loop, request)
        assert loop.scheduler.statistics().preemptions == 0
    assert counts(plenty)[1:4] == [8, 8, 8]
    late = counts(scarce)[4:]
    assert max(late) <= 4 < max(counts(scarce)), counts(scarce)


def test_requests_that_preempt_each_other_stay_exact() -> None:
    loop = loop_of(page_size=2, pages=22)
    requests = [make_request(f"prompt {number}", max_tokens=24) for number in range(4)]
    for request in requests:
        loop.submit(request)
    loop.run()
    exact(loop, *requests)
    assert loop.scheduler.statistics().preemptions > 0
    assert max(counts(loop)) > 1


def test_a_step_that_raises_fails_its_requests_once() -> None:
    failed = list[StepPlan]()

    def fail(plan: StepPlan) -> BaseException | None:
        if plan.steps == 1 or failed:
            return None
        failed.append(plan)
        return RuntimeError("on fire")

    loop = LoopBuilder().steps(repeated=8, fail=fail).loop()
    requests = [make_request(f"prompt {number}", max_tokens=24) for number in range(2)]
    for request in requests:
        loop.submit(request)
    loop.run()
    for request in requests:
        assert [event.finish_reason for event in loop.events[request.id]].count(FinishReason.FAILED) == 1
    assert loop.scheduler.statistics().pages_held == 0


def test_a_single_step_of_a_paused_session_is_single() -> None:
    loop, request = loop_of(), make_request("step by step", max_tokens=12)
    loop.submit(request)
    for _ in range(3):
        plan = loop.scheduler.plan(now=True)
        assert plan is not None and plan.steps == 1
        loop.in_flight.append(loop.runner.dispatch(plan))
        loop.commit()
    loop.run()
    exact(loop, request)


def test_states_and_windows_keep_steps_single() -> None:
    """Each of their rows has slots or pages of its own, which the host names."""
    for builder in (LoopBuilder().states(slots=4), LoopBuilder().window(positions=8, pages=20)):
        loop, request = builder.steps(repeated=8).loop(), make_request("a prompt", max_tokens=20)
        loop.submit(request)
        loop.run()
        exact(loop, request)
        assert set(counts(loop)) == {1}


def test_steps_are_repeated_once_their_program_is_ready() -> None:
    programs = Programs(ahead=False)
    programs.make("plain")
    repeated = Program(frozenset({"plain", "repeated"}), False)
    loop = LoopBuilder().steps(repeated=8, programs=programs).loop()
    first, second = make_request("first", max_tokens=20), make_request("second", max_tokens=20)
    loop.submit(first)
    for _ in range(8):
        loop.step()
    assert programs.wanted == (repeated,), "it is made in the background"
    loop.run()
    assert set(counts(loop)) == {1}
    programs.made.add(repeated)
    loop.submit(second)
    loop.run()
    exact(loop, first, second)
    assert max(counts(loop)) == 8 and not programs.wanted


def test_a_dispatch_is_bounded_by_the_time_that_steps_take() -> None:
    """Clocks decide nothing here: the results say how long steps took."""
    limits = Limits(4, 32, 1024, 8, repeated_steps=8, repeated_seconds=0.008)
    loop = loop_of()
    ledger = PageLedger(loop.pool, loop.cache, 8)

    def bound(*steps: tuple[float, int]) -> int:
        repeats = Repeats(limits, ledger)
        for seconds, count in steps:
            rows: Any = (None,) * count
            repeats.learn(StepResult(StepPlan(0, rows, (), steps=count), (), device_seconds=seconds))
        return repeats._bound()

    assert bound() == 8
    assert bound((0.0005, 1)) == 8
    assert bound((0.002, 1)) == 4
    assert bound((0.016, 8)) == 4
    assert bound((0.009, 1)) == 0
    assert bound((0.001, 1), (5.0, 1)) == 7  # one step that was held up says little


def test_more_rows_than_any_program_has_keep_steps_single() -> None:
    loop = loop_of()
    repeats = loop.scheduler._repeats
    repeats._limits = dataclasses.replace(repeats._limits, repeated_rows=1)
    short, long = make_request("short", max_tokens=12), make_request("long", max_tokens=30)
    for request in (short, long):
        loop.submit(request)
    loop.run()
    exact(loop, short, long)
    steps = [(len(plan.first_decode), plan.steps) for plan in loop.runner.plans]
    assert {count for rows, count in steps if rows == 2} == {1}
    assert (1, 8) in steps
