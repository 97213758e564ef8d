"""A row that can't be prepared, and a page that can't be restored, end their own requests and no others."""

from __future__ import annotations

import pytest

from helpers.fakes import DictTier, make_request
from helpers.scheduling import LoopBuilder, exact
from rekindle._src.core.records import FinishReason, PageMove, Row, Status
from rekindle.errors import InvalidRequest, RequestFailed, StepFailed, StoreError


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [3, 21, 60])
def test_a_row_that_can_not_be_prepared_fails_its_request_alone(overlap: bool, length: int) -> None:
    """A decode row's worth of prompt, one chunk, and a prompt of several chunks."""
    loop = LoopBuilder(overlap=overlap).loop()
    others = [make_request(f"neighbour {index} " * 2, max_tokens=12) for index in range(5)]
    bad = make_request("b" * length, max_tokens=9)

    def refuse(row: Row) -> Exception | None:
        return OverflowError("int too big to convert") if row.request is bad else None

    loop.runner.refuse = refuse
    for request in (*others[:2], bad, *others[2:]):
        loop.submit(request)
    loop.run()
    exact(loop, *others)
    last = loop.events[bad.id][-1]
    assert last.finish_reason is FinishReason.FAILED and loop.output(bad) == []
    assert isinstance(last.error, RequestFailed) and not isinstance(last.error, StepFailed)
    assert isinstance(last.error.__cause__, OverflowError) and "could not be made part of a step" in str(last.error)
    assert loop.scheduler.status(bad.id) is Status.FAILED
    assert loop.scheduler.statistics().failed == 1


def test_a_request_that_fails_in_the_middle_keeps_what_it_had_and_its_drafts_count_for_nothing() -> None:
    loop = LoopBuilder(max_requests=4).drafts(lookup=3).loop()
    bad = make_request("abcabcabcabc", max_tokens=40)
    other = make_request("xyzxyzxyz", max_tokens=20)
    error = InvalidRequest("min_tokens", 2, "is wrong", "Use 0")
    loop.runner.refuse = lambda row: error if row.request is bad and row.generated > 4 else None
    loop.submit(bad)
    loop.submit(other)
    loop.run()
    exact(loop, other)
    assert loop.events[bad.id][-1].error is error, "a typed error is passed on as it is"
    made = loop.output(bad)
    assert 4 <= len(made) < 40 and made == loop.model.generate(bad)[: len(made)]


def test_a_waiter_computes_the_prefix_of_a_request_that_failed() -> None:
    loop = LoopBuilder().loop()
    bad = make_request("s" * 40, max_tokens=4)
    waiting = make_request("s" * 40 + "t", max_tokens=4)
    loop.runner.refuse = lambda row: ValueError("no") if row.request is bad else None
    loop.submit(bad)
    loop.submit(waiting)
    loop.run()
    exact(loop, waiting)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_page_that_can_not_be_restored_fails_who_holds_it_and_is_computed_the_next_time(overlap: bool) -> None:
    tier = DictTier()
    loop = LoopBuilder(pages=12, page_size=8, overlap=overlap, max_requests=3).cache(host_tier=tier).loop()
    first = make_request("p" * 33, max_tokens=2)
    loop.submit(first)
    loop.run()
    for index in range(4):  # push its pages off the device
        loop.submit(make_request(f"{index}" * 60, max_tokens=2))
        loop.run()
    bad: set[PageMove] = set()

    def lose(move: PageMove) -> Exception | None:
        if loop.runner.lose is not None and not bad:
            bad.add(move)
            return StoreError("page has arrays of another layout")
        return None

    loop.runner.lose = lose
    again, sharing = make_request("p" * 33, max_tokens=6), make_request("p" * 33 + "q", max_tokens=6)
    other = make_request("neighbour", max_tokens=12)
    for request in (other, again, sharing):
        loop.submit(request)
    loop.run()
    exact(loop, other)
    assert bad, "the prompt's pages are meant to be restored"
    failed = [request for request in (again, sharing) if loop.reason(request) is FinishReason.FAILED]
    assert again in failed
    assert all(isinstance(loop.events[request.id][-1].error, StoreError) for request in failed)
    exact(loop, *(request for request in (again, sharing) if request not in failed))
    assert not any(move.digest in tier for move in bad), "the payload is not offered again"
    later = make_request("p" * 33, max_tokens=6)
    loop.submit(later)
    loop.run()
    exact(loop, later)


def test_all_pages_can_be_taken_after_a_restore_has_failed_while_a_step_was_in_flight() -> None:
    """The request that fails holds pages whose children have left the device: these can be evicted when it ends."""
    loop = LoopBuilder(pages=24, page_size=4, max_tokens_per_step=16).cache(host_tier=DictTier(1000)).loop()

    def run(prompt: list[int]) -> None:
        request = make_request(prompt, max_tokens=4)
        loop.submit(request)
        loop.run()
        assert loop.output(request) == loop.model.generate(request)

    first = [position * 7 % 90 for position in range(60)]
    run(first)
    run([(50 + 3 * position) % 89 for position in range(64)])
    loop.runner.lose = lambda move: StoreError("it is gone")
    loop.submit(make_request([*first, 91], max_tokens=4))
    loop.dispatch(2)
    loop.run()
    loop.runner.lose = lambda move: None
    run([(30 + 3 * position) % 89 for position in range(88)])
