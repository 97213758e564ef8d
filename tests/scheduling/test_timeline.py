"""The timeline of a request: one mark for each change, programs cut out of its phases, bounded whatever happens."""

from __future__ import annotations

import time

import pytest

from helpers.scheduling import Loop, LoopBuilder, make_request
from rekindle import Explanation, Phase, PhaseKind
from rekindle._src.core.activity import ProgramWait, WaitSpan
from rekindle._src.core.records import Request
from rekindle._src.scheduling.timeline import Timeline

INTAKE, QUEUED, PAGES, COMPILING = PhaseKind.INTAKE, PhaseKind.QUEUED, PhaseKind.PAGES, PhaseKind.COMPILING
PREFILL, DECODE, PREEMPTED = PhaseKind.PREFILL, PhaseKind.DECODE, PhaseKind.PREEMPTED


def kinds(phases: tuple[Phase, ...]) -> list[PhaseKind]:
    return [phase.kind for phase in phases]


def connected(phases: tuple[Phase, ...]) -> None:
    """Check that each phase begins where the one before it ends."""
    end = 0.0
    for phase in phases:
        assert phase.start == pytest.approx(end, abs=1e-9) and phase.seconds >= 0
        end = phase.start + phase.seconds


def test_phases_follow_each_other_from_the_submission_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    timeline = Timeline(now - 3.0)
    timeline.enter(QUEUED, "2 requests before it")
    timeline.enter(QUEUED, "all slots were taken (1)")
    timeline.enter(PREFILL)
    timeline.enter(DECODE, computed=7, generated=1)
    phases = timeline.phases(now + 2.0, generated=5)
    connected(phases)
    assert kinds(phases) == [INTAKE, QUEUED, PREFILL, DECODE]
    assert phases[0].seconds == pytest.approx(3.0) and phases[1].reason == "all slots were taken (1)"
    assert (phases[2].tokens, phases[3].tokens) == (7, 4)
    assert "4 tokens, 2.0 per s" in str(phases[3]) and "\n" not in str(phases[3])


def test_a_submission_in_another_process_begins_now() -> None:
    for arrival in (0.0, time.perf_counter() + 1e6):
        timeline = Timeline(arrival)
        timeline.enter(QUEUED)
        assert kinds(timeline.phases(None)) == [QUEUED]


def test_waits_for_programs_are_cut_out_of_the_phase_that_they_fell_into() -> None:
    timeline = Timeline(0.0)
    timeline.enter(PREFILL)
    at = timeline.began
    waits = [
        WaitSpan(at - 9.0, at - 8.0, "of another request"),
        WaitSpan(at + 0.1, at + 2.0, "a"),
        WaitSpan(at + 2.0001, at + 3.0, "b"),
        WaitSpan(at + 3.5, at + 3.5001, "too short to show"),
    ]
    phases = timeline.phases(at + 4.0, waits, computed=9)
    connected(phases)
    assert kinds(phases) == [PREFILL, COMPILING, PREFILL]
    assert [round(phase.seconds, 2) for phase in phases] == [0.1, 2.9, 1.0]
    assert phases[1].reason == "program a, b" and [phase.tokens for phase in phases] == [0, 0, 9]


def test_a_wait_in_progress_is_one_of_them() -> None:
    wait, began = ProgramWait(), time.perf_counter()
    with wait.waiting("first"):
        pass
    between = time.perf_counter()
    with wait.waiting("second"):
        assert [span.program for span in wait.since(began)] == ["first", "second"]
        assert [span.program for span in wait.since(between)] == ["second"]
    assert [span.program for span in wait.since(between)] == ["second"]


def test_a_life_of_many_changes_stays_short_and_its_sums_exact() -> None:
    timeline = Timeline(0.0)
    for number in range(5000):
        timeline.enter(PREEMPTED, f"gave its pages to request r{number}")
        timeline.enter(PREFILL, computed=0)
        timeline.enter(DECODE, computed=5, generated=number)
    phases = timeline.phases(None, computed=5, generated=5000)
    assert len(phases) < 320
    assert sum(phase.times for phase in phases) == 15000
    assert sum(phase.tokens for phase in phases if phase.kind is PREFILL) == 25000
    assert sum(phase.seconds for phase in phases) == pytest.approx(phases[-1].start + phases[-1].seconds)


def submit(loop: Loop, *requests: Request) -> None:
    for request in requests:
        loop.submit(request)


def explained(loop: Loop, request: Request) -> Explanation:
    found = loop.scheduler.explain(request.id)
    assert found is not None
    return found


def test_a_request_is_told_of_its_waits_for_slots_and_pages_and_of_preemptions() -> None:
    loop = LoopBuilder(max_requests=1, overlap=False).loop()
    first, second = make_request("first", max_tokens=3), make_request("second", max_tokens=3)
    submit(loop, first, second)
    loop.run()
    phases = explained(loop, second).timeline
    connected(phases)
    assert kinds(phases) == [QUEUED, PREFILL, DECODE] and phases[0].reason == "1 request before it"
    assert (phases[1].tokens, phases[2].tokens) == (len(second.token_ids), 2)

    loop = LoopBuilder(max_requests=4, overlap=False, pages=6).loop()
    requests = [make_request(letter * 20, max_tokens=20) for letter in "abc"]
    submit(loop, *requests)
    loop.step()
    assert PAGES in kinds(explained(loop, requests[1]).timeline)
    loop.run()
    told = [phase for phase in explained(loop, requests[1]).timeline if phase.kind is PAGES]
    assert "pages minus cached ones" in told[0].reason

    loop = LoopBuilder(max_requests=4, pages=12).cache(prefixes=False).loop()
    requests = [make_request(f"{index} and text", max_tokens=40, eos_ids=()) for index in range(4)]
    submit(loop, *requests)
    loop.run()
    lives = [explained(loop, request) for request in requests]
    preempted = [life for life in lives if life.preemptions]
    assert preempted, "nobody was preempted"
    for life in preempted:
        assert kinds(life.timeline).count(PREEMPTED) == life.preemptions
        reasons = [phase.reason for phase in life.timeline if phase.kind is PREEMPTED]
        assert all("pages" in reason for reason in reasons), reasons
        assert sum(phase.tokens for phase in life.timeline if phase.kind is DECODE) <= life.generated_tokens
