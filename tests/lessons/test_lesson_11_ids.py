"""Ids are opaque, unique and returned at submit; aborting one never touches another whose id begins with it.

Upstream: https://github.com/vllm-project/vllm/issues/10583
Two requests with the same id broke the engine.
Upstream: https://github.com/sgl-project/sglang/pull/31685
An abort matched every request whose id begins with the one that was given.
"""

from __future__ import annotations

import pytest

from helpers.fakes import make_request
from helpers.scheduling import LoopBuilder
from helpers.sessions import fake_session, opened
from rekindle._src.core.records import FinishReason, Status
from rekindle.errors import InvalidRequest


def test_lesson_11_ids_are_unique_over_all_sessions_and_known_at_submit() -> None:
    with opened() as one, fake_session() as two:
        handles = [session.submit("same", max_tokens=2) for session in (one, two) for _ in range(30)]
        assert len({handle.id for handle in handles}) == 60
        assert [handle.result_sync().id for handle in handles] == [handle.id for handle in handles]


def test_lesson_11_abort_ends_exactly_the_request_it_names() -> None:
    loop = LoopBuilder(max_requests=2).loop()
    requests = [make_request(f"request {id}", id=id, max_tokens=6) for id in ("a1", "a10", "a", "0", "")]
    for request in requests:
        loop.submit(request)
    loop.step()
    loop.take(loop.scheduler.abort("a1"), loop.scheduler.abort("nobody"))
    loop.run()
    assert loop.reason(requests[0]) is FinishReason.ABORTED
    for request in requests[1:]:
        assert loop.output(request) == loop.model.generate(request), f"id {request.id!r}"


def test_lesson_11_a_duplicate_id_is_refused_and_the_first_one_lives() -> None:
    loop = LoopBuilder().loop()
    first = make_request("first", id="same", max_tokens=4)
    loop.submit(first)
    with pytest.raises(InvalidRequest, match="still alive"):
        loop.scheduler.submit(make_request("second", id="same"))
    loop.run()
    assert loop.output(first) == loop.model.generate(first)
    again = make_request("third", id="same", max_tokens=2)
    loop.submit(again)
    assert loop.scheduler.status("same") is Status.QUEUED
    loop.run()
    assert loop.output(again) == loop.model.generate(again)
