"""Steps with drafts: when there are any, how many, and that no token depends on them."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, Unpack

import pytest

from helpers.fakes import EOS, EchoModel, FakeModel, make_request
from helpers.scheduling import Loop, LoopBuilder, NoReserve, Sizes
from rekindle._src.core.records import FinishReason, Request, StepPlan
from rekindle._src.core.report_kinds import LOGPROBS
from rekindle._src.programs.buckets import padded_rows
from rekindle._src.scheduling.admission import Reserve
from rekindle._src.scheduling.drafting.drafter import DraftableRow, Drafter
from rekindle._src.scheduling.drafting.proposal import Proposal, RequestDrafts
from rekindle._src.scheduling.sequence import Sequence

ECHO = EchoModel(alphabet=tuple(range(32, 127)))
PARROT = EchoModel(surprises=0.0)


def run(*requests: Request, lookup: int = 3, reserve: Reserve | None = None, **sizes: Unpack[Sizes]) -> Loop:
    builder = LoopBuilder(model=ECHO, max_tokens_per_step=64).sizes(**sizes)
    loop = builder.drafts(lookup=lookup).queue(reserve=reserve).loop()
    for request in requests:
        loop.submit(request)
    loop.run()
    return loop


def drafts(loop: Loop) -> list[int]:
    """Of each step."""
    return [sum(row.draft for row in plan.decode) for plan in loop.runner.plans]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_text_that_repeats_takes_fewer_steps_and_stays_the_same(overlap: bool, temperature: float) -> None:
    options: dict[str, Any] = {"max_tokens": 100, "temperature": temperature, "eos_ids": ()}
    request = make_request("some text, ", **options)
    loop = run(request, overlap=overlap)
    assert loop.output(request) == ECHO.generate(request)
    plain = run(make_request("some text, ", **options), overlap=overlap, lookup=0)
    assert len(loop.runner.plans) < 0.75 * len(plain.runner.plans)
    statistics = loop.scheduler.statistics()
    assert statistics.drafted_tokens == sum(drafts(loop))
    assert 0 < statistics.accepted_tokens < statistics.drafted_tokens, "no draft was rejected"
    assert statistics.generated_tokens == 100
    assert plain.scheduler.statistics().drafted_tokens == 0
    accepted, drafted = statistics.accepted_tokens, statistics.drafted_tokens
    assert f"{accepted} of {drafted} draft tokens were accepted" in str(loop.scheduler.explain(request.id))


@pytest.mark.parametrize("max_tokens", range(20, 41))
def test_the_drafts_of_the_step_that_a_request_ends_in_count_as_the_sessions(max_tokens: int) -> None:
    """It once told 38 of 47 where the session had counted 42 of 51."""
    request = make_request("some text, ", max_tokens=max_tokens, eos_ids=())
    loop = run(request)
    statistics = loop.scheduler.statistics()
    accepted, drafted = statistics.accepted_tokens, statistics.drafted_tokens
    assert f"{accepted} of {drafted} draft tokens were accepted" in str(loop.scheduler.explain(request.id))


def test_text_that_does_not_repeat_is_planned_as_without() -> None:
    def steps(lookup: int) -> list[tuple[int, ...]]:
        requests = [make_request(f"{index} and text", max_tokens=20) for index in range(3)]
        plans = run(*requests, lookup=lookup, model=FakeModel()).runner.plans
        return [tuple(row.start for row in plan.rows) for plan in plans]

    assert steps(3) == steps(0)


def test_nothing_is_planned_while_drafts_are_in_flight() -> None:
    loop = LoopBuilder(model=PARROT).drafts(lookup=3).loop()
    loop.submit(make_request("again and again and ", max_tokens=60))
    other = make_request("a prompt of its own", max_tokens=20)
    while not drafts(loop)[-1:] or not drafts(loop)[-1]:
        plan = loop.scheduler.plan()
        if plan is not None:
            loop.in_flight.append(loop.runner.dispatch(plan))
        if plan is None or len(loop.in_flight) > 1:
            loop.commit()
    loop.submit(other)
    assert loop.scheduler.plan() is None
    while loop.in_flight:
        loop.commit()
    plan = loop.scheduler.plan()
    assert plan is not None and other.id in {row.request.id for row in plan.rows}


def test_the_first_drafts_follow_a_token_that_the_host_does_not_know() -> None:
    """Going over to drafts costs no wait: the token in flight is drafted as well."""
    loop = run(make_request("again and again and ", max_tokens=30), model=PARROT)
    first = next(plan for plan in loop.runner.plans if plan.drafted)
    assert first.decode[0].token_ids is None


@pytest.mark.parametrize("max_requests", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("count", [1, 3, 5, 8])
def test_drafts_fill_few_rows_or_what_would_be_padding(max_requests: int, count: int) -> None:
    requests = [make_request(f"{index}, again and again and ", max_tokens=30) for index in range(count)]
    loop = run(*requests, model=PARROT, max_requests=max_requests, lookup=5, max_prefill_rows=8)
    for plan in loop.runner.plans:
        owners = sum(not row.draft for row in plan.decode)
        if plan.drafted:
            padded = padded_rows(owners, max_requests, mixed=bool(plan.prefill))
            assert len(plan.decode) <= max(padded, min(8, max_requests))
    for request in requests:
        assert loop.output(request) == PARROT.generate(request)
    most = min(count, max_requests)
    if max(padded_rows(most, max_requests, mixed=False), min(8, max_requests)) > most:
        assert sum(drafts(loop)) > 0


def test_no_request_gets_more_than_its_share_or_its_bound() -> None:
    requests = [make_request(f"{index}, again and again and ", max_tokens=60) for index in range(2)]
    plans = run(*requests, model=PARROT, max_requests=8, lookup=2).runner.plans
    for plan in plans:
        for request in requests:
            assert sum(row.draft and row.request is request for row in plan.decode) <= 2
    assert any(sum(row.draft for row in plan.decode) == 4 for plan in plans)


def test_the_end_may_come_amid_the_drafts() -> None:
    """Ends by count, by token and by both masks: drafts past it leave no trace."""
    reasons = set()
    for seed in range(60):
        model = EchoModel(alphabet=tuple(range(40, 60)), eos_rate=0.15, surprises=0.3, salt=seed)
        options: dict[str, Any] = {"min_tokens": seed % 7, "max_tokens": 7 + seed % 20, "logprobs": 1}
        request = make_request("again and again and ", stop_ids=(50, 51), **options)
        loop = run(request, model=model, lookup=3)
        expected = model.generate(request)
        assert loop.output(request) == expected, seed
        assert [entry.token_id for event in loop.events[request.id] for entry in LOGPROBS.of(event)] == expected
        assert loop.scheduler.statistics().generated_tokens == len(expected)
        reasons.add(loop.reason(request))
    assert reasons == {FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH}


def test_the_context_ends_exactly_at_its_limit() -> None:
    request = make_request("again and again and ", max_tokens=200)
    loop = run(request, model=PARROT, max_model_len=50, page_size=8)
    assert loop.reason(request) is FinishReason.CONTEXT
    assert loop.output(request) == PARROT.generate(request, 30)
    assert all(row.start < 50 for plan in loop.runner.plans for row in plan.decode)


def test_rejected_drafts_never_reach_the_prefix_cache() -> None:
    """Pages that are published hold what was accepted: a request that goes on from there is exact."""
    model = EchoModel(surprises=0.4, alphabet=tuple(range(40, 44)))
    first = make_request("again and again and ", max_tokens=60, eos_ids=())
    loop = run(first, model=model, page_size=2)
    assert loop.scheduler.statistics().accepted_tokens < loop.scheduler.statistics().drafted_tokens
    whole = [*first.token_ids.tolist(), *loop.output(first)]
    again = [make_request(whole[:length], max_tokens=8) for length in range(20, 80, 7)]
    for request in again:
        loop.submit(request)
        loop.run()
        assert loop.output(request) == model.generate(request)
    assert loop.scheduler.statistics().cached_tokens > 300


def test_drafts_take_no_page_that_somebody_may_need() -> None:
    """As many preemptions as without."""

    def preempted(lookup: int) -> int:
        requests = [make_request(f"{index}, again and again and ", max_tokens=60) for index in range(4)]
        loop = run(*requests, model=PARROT, pages=20, page_size=8, reserve=NoReserve(), lookup=lookup)
        for request in requests:
            assert loop.output(request) == PARROT.generate(request)
        return loop.scheduler.statistics().preemptions

    assert 0 < preempted(3) <= preempted(0)


def test_a_request_that_ends_from_outside_with_drafts_in_flight_gives_everything_back() -> None:
    loop = LoopBuilder(model=PARROT).drafts(lookup=3).loop()
    request = make_request("again and again and ", max_tokens=60)
    loop.submit(request)
    while not any(drafts(loop)):
        loop.step()
    loop.take(loop.scheduler.abort(request.id))
    before = len(loop.output(request))
    loop.run()
    assert loop.reason(request) is FinishReason.ABORTED
    assert len(loop.output(request)) == before
    assert loop.pool.held == 0


def test_a_failed_step_with_drafts_fails_its_requests_once() -> None:
    def fail(plan: StepPlan) -> BaseException | None:
        return RuntimeError("on fire") if plan.drafted else None

    loop = LoopBuilder(model=PARROT).drafts(lookup=3).steps(fail=fail).loop()
    request = make_request("again and again and ", max_tokens=60, eos_ids=(EOS,))
    loop.submit(request)
    loop.run()
    assert loop.reason(request) is FinishReason.FAILED
    assert loop.pool.held == 0


class Oracle(Drafter):
    """Proposes the very text of requests whose prompt begins with its letter, or a wrong one."""

    def __init__(self, name: str, letter: str, *, wrong: bool = False) -> None:
        self.name, self._letter, self._wrong = name, letter, wrong
        self.ended = 0

    def begin(self, sequence: Sequence) -> RequestDrafts | None:
        return RequestDrafts() if chr(sequence.request.token_ids[0]) in self._letter else None

    def propose(self, rows: Items[DraftableRow]) -> list[Proposal | None]:
        return [self._of(row) for row in rows]

    def _of(self, row: DraftableRow) -> Proposal | None:
        first = row.sequence.tokens.generated + row.skip
        text = PARROT.generate(row.sequence.request)[first : first + row.most]
        return Proposal([token ^ self._wrong for token in text], [0.9] * len(text)) if text else None

    def end(self, sequence: Sequence) -> None:
        self.ended += 1


def test_the_first_drafter_with_a_proposal_has_the_row() -> None:
    right, wrong = Oracle("right", "a"), Oracle("wrong", "ab", wrong=True)
    loop = LoopBuilder(model=PARROT, max_requests=8, max_tokens_per_step=64).drafts(drafters=[right, wrong]).loop()
    requests = [make_request(f"{letter} prompt", max_tokens=30, eos_ids=()) for letter in "abc"]
    for request in requests:
        loop.submit(request)
        loop.run()
        assert loop.output(request) == PARROT.generate(request)
    counts = loop.scheduler.statistics().drafters
    assert counts["right"].accepted == counts["right"].drafted > 20
    assert counts["wrong"].accepted == 0 < counts["wrong"].drafted
    assert counts["right"].accepted < 30
    assert (right.ended, wrong.ended) == (2, 2), "the last request was drafted for by none"
