"""Ids are opaque: exact, unique while alive, and nothing is special about any of them.

Upstream: https://github.com/vllm-project/vllm/issues/10583
Two requests with the same id broke the engine.
"""

from __future__ import annotations

import pytest

from helpers.fakes import make_request
from helpers.scheduling import Loop
from rekindle._src.core.records import FinishReason, Status
from rekindle.errors import InvalidRequest


def test_lesson_11_abort_ends_exactly_the_request_it_names() -> None:
    loop = Loop(max_requests=2)
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
    loop = Loop()
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
