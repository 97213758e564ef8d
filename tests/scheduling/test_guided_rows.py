"""Guided requests in the scheduler: exact among others, through drafts of forced tokens, preemption and failures."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.fakes import FakeModel, extended, make_request
from helpers.guides import RuleGuide, letters
from helpers.scheduling import Loop, LoopBuilder, NoReserve
from rekindle._src.capabilities.guides.guidance import GUIDED, Guidance
from rekindle._src.capabilities.guides.step import Guides
from rekindle._src.core.records import FinishReason, GuideReport, Mask, Request
from rekindle._src.dispatch.backend import LoopTurn
from rekindle.errors import RequestFailed

MODEL = FakeModel()


def guided(prompt: str, length: int = 20, **options: object) -> Request:
    return make_request(prompt, guide=RuleGuide(letters, length), max_tokens=60, **options)  # type: ignore[arg-type]


def wanted(request: Request) -> list[int]:
    """What the plain loop gives, from a guide that was not used yet."""
    guidance = request.extensions.get(Guidance)
    if guidance is not None:
        request = extended(request, Guidance(RuleGuide(letters, getattr(guidance.guide, "length", 1 << 30))))
    return MODEL.generate(request)


def check(loop: Loop, *requests: Request) -> None:
    for request in requests:
        assert loop.output(request) == wanted(request), request.id


@pytest.mark.parametrize("overlap", [False, True])
def test_guided_and_free_rows_are_exact_together(overlap: bool) -> None:
    loop = LoopBuilder(overlap=overlap, model=MODEL).loop()
    requests = [
        guided("first prompt"),
        make_request("free", max_tokens=30),
        guided("second", 31, temperature=1.0, seed=5),
    ]
    for request in requests:
        loop.submit(request)
    loop.run()
    check(loop, *requests)
    assert [loop.reason(request) for request in requests] == [
        FinishReason.GRAMMAR, FinishReason.LENGTH, FinishReason.GRAMMAR,
    ]  # fmt: skip
    told = [guided for event in loop.events[requests[0].id] for guided in GUIDED.of(event)]
    assert [one.forced for one in told] == [position % 3 != 0 for position in range(20)]
    assert told[-1].ended and not told[-2].ended


def test_forced_tokens_are_drafted_and_take_fewer_steps() -> None:
    loop = LoopBuilder(model=MODEL).loop()
    request = guided("a prompt", 30)
    loop.submit(request)
    loop.run()
    check(loop, request)
    stats = loop.scheduler.statistics()
    assert stats.accepted_tokens > 8
    assert stats.drafted_tokens - stats.accepted_tokens <= 1, "the last forced token is drafted, and nothing follows it"
    assert stats.steps < 30
    assert "left no choice for 20 of them" in str(loop.scheduler.explain(request.id))


@pytest.mark.parametrize("call", ["fill", "consume"])
@pytest.mark.parametrize("error", [RuntimeError("the grammar's own code"), MemoryError()], ids=repr)
def test_a_guide_that_raises_fails_its_own_request(call: str, error: Exception) -> None:
    class Raises(RuleGuide):
        def fill(self, mask: Mask) -> str:
            if call == "fill" and self.consumed == 4:
                raise error
            return super().fill(mask)

        def consume(self, token: int) -> GuideReport:
            if call == "consume" and self.consumed == 4:
                raise error
            return super().consume(token)

        def copy(self) -> Raises:
            return dataclasses.replace(self, history=[*self.history])

    loop = LoopBuilder(model=MODEL).loop()
    failing = make_request("first prompt", guide=Raises(letters, 20), max_tokens=60)
    others = [guided("first prompt"), make_request("free", max_tokens=30)]
    for request in (failing, *others):
        loop.submit(request)
    loop.run()
    check(loop, *others)
    last = loop.events[failing.id][-1]
    assert last.finish_reason is FinishReason.FAILED
    assert isinstance(last.error, RequestFailed) and last.error.__cause__ is error


def test_a_wrong_spelling_is_rejected_not_injected() -> None:
    """The guide proposes one of several spellings; the model's own is what counts."""

    class Spells(RuleGuide):
        def ahead(self) -> tuple[int, ...]:
            return (97,) * 4

        def copy(self) -> RuleGuide:
            return dataclasses.replace(self, history=[*self.history])

    def any_letter(position: int, last: int) -> range:
        return range(97, 123)

    request = make_request("a prompt", guide=Spells(any_letter, 40), max_tokens=60)
    loop = LoopBuilder(model=MODEL).loop()
    loop.submit(request)
    loop.run()
    plain = make_request("a prompt", guide=RuleGuide(any_letter, 40), max_tokens=60)
    assert loop.output(request) == MODEL.generate(plain)
    stats = loop.scheduler.statistics()
    assert stats.accepted_tokens < stats.drafted_tokens < 30, "it stops proposing what is rejected"


def test_drafts_wait_for_the_device_only_where_there_are_some() -> None:
    loop = LoopBuilder(model=MODEL).loop()
    request = make_request("x", guide=RuleGuide(lambda position, last: range(97, 123), 12), max_tokens=60)
    loop.submit(request)
    loop.run()
    assert not any(plan.drafted for plan in loop.runner.plans)
    assert Guides().in_plan(loop.runner.plans[1])


def test_preempted_requests_go_on_where_they_were() -> None:
    loop = LoopBuilder(pages=14, max_requests=4, model=MODEL).queue(reserve=NoReserve()).loop()
    requests = [guided(f"prompt {index} " * 2, 50) for index in range(4)]
    for request in requests:
        loop.submit(request)
    loop.run()
    check(loop, *requests)
    assert loop.scheduler.statistics().preemptions > 0


def test_min_tokens_beyond_the_end_of_a_grammar_fail_that_request_alone() -> None:
    loop = LoopBuilder(model=MODEL).loop()
    short, other = guided("short", 5, min_tokens=9), guided("other", 9)
    for request in (short, other):
        loop.submit(request)
    loop.run()
    check(loop, other)
    last = loop.events[short.id][-1]
    assert last.finish_reason is FinishReason.FAILED
    assert isinstance(last.error, RequestFailed)
    assert "complete after 5 tokens" in str(last.error) and "min_tokens=9" in str(last.error)


def test_a_guide_that_can_not_go_on_fails_its_request_alone() -> None:
    loop = LoopBuilder(model=MODEL).loop()
    stuck = make_request("stuck", guide=RuleGuide(letters, 30, fails_at=7), max_tokens=60)
    other = guided("other", 20)
    for request in (stuck, other):
        loop.submit(request)
    loop.run()
    check(loop, other)
    last = loop.events[stuck.id][-1]
    assert last.finish_reason is FinishReason.FAILED and "it was told to fail" in str(last.error)
    assert len(loop.output(stuck)) == 7


def test_max_tokens_cut_a_guided_text() -> None:
    loop = LoopBuilder(model=MODEL).loop()
    request = make_request("x", guide=RuleGuide(letters, 40), max_tokens=10)
    loop.submit(request)
    loop.run()
    assert loop.reason(request) is FinishReason.LENGTH and len(loop.output(request)) == 10
    assert not GUIDED.of(loop.events[request.id][-1])[-1].accepting


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_anything_beside_anything(data: st.DataObject) -> None:
    """Guided and free requests that come, are cancelled, preempted and end at any time; all others are exact."""
    lookup = data.draw(st.sampled_from([0, 3]))
    loop = (
        LoopBuilder(pages=data.draw(st.integers(14, 60)), max_requests=4, model=MODEL, overlap=data.draw(st.booleans()))
        .queue(reserve=NoReserve())
        .drafts(lookup=lookup)
        .loop()
    )
    requests: list[Request] = []
    aborted: set[str] = set()
    for _ in range(data.draw(st.integers(5, 40))):
        act = data.draw(st.integers(0, 9))
        if act <= 1 and len(requests) < 8:
            prompt = "p" * data.draw(st.integers(1, 20)) + str(len(requests))
            options = {"temperature": data.draw(st.sampled_from([0.0, 1.0])), "seed": len(requests)}
            if data.draw(st.booleans()):
                requests.append(guided(prompt, data.draw(st.integers(1, 40)), **options))
            else:
                requests.append(make_request(prompt, max_tokens=data.draw(st.integers(1, 40)), **options))
            loop.submit(requests[-1])
        elif act == 2 and requests:
            request = data.draw(st.sampled_from(requests))
            event = loop.scheduler.abort(request.id)
            if event is not None:
                aborted.add(request.id)
                loop.take(event)
        else:
            loop.step()
    loop.run()
    for request in requests:
        made, whole = loop.output(request), wanted(request)
        assert made == (whole[: len(made)] if request.id in aborted else whole)


def test_a_failed_step_does_not_hold_up_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after it waits for tokens that never come, and still runs for its other rows."""
    loop = LoopBuilder(model=MODEL, max_requests=4).loop()
    first, second = guided("first", 30), make_request("second", max_tokens=20)
    for request in (first, second):
        loop.submit(request)
    for _ in range(3):
        loop.step()
    before = loop.engine.awaited(LoopTurn(None))
    loop.runner.fail_fetch = lambda plan: RuntimeError("broken") if plan is before else None
    loop.run()
    assert loop.reason(first) is FinishReason.FAILED
    third = guided("third", 9)
    loop.submit(third)
    loop.run()
    check(loop, third)


def test_masks_are_numbers_of_32_bits() -> None:
    mask = np.zeros(2, np.int32)
    RuleGuide(lambda position, last: (0, 31, 33)).fill(mask)
    assert mask.view(np.uint32).tolist() == [0x80000001, 2]
