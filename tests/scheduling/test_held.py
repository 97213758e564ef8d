"""A request whose captures wait for a slow disk is in no step, and holds nobody else up."""

from __future__ import annotations

import pytest

from helpers.fakes import extended, make_request
from helpers.scheduling import LoopBuilder, exact
from rekindle._src.capabilities.captures.tapped import RequestTaps
from rekindle._src.core.captured import Backlog
from rekindle._src.core.records import Request
from rekindle._src.dispatch import engine

PROMPT = "a prompt that goes on for some pages, the first of which others share"


def capturing(prompt: str, backlog: Backlog, **sampling: object) -> Request:
    """A request that captures; the fake runner computes nothing for it."""
    request = make_request(prompt, **sampling)  # type: ignore[arg-type]
    return extended(request, RequestTaps(backlog=backlog))


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
@pytest.mark.parametrize("after", [1, 4])
def test_others_go_on_while_it_is_held(after: int, policy: str) -> None:
    backlog = Backlog(most=100)
    loop = LoopBuilder(max_tokens_per_step=16).queue(policy=policy).loop()
    slow = capturing(PROMPT, backlog, max_tokens=8)
    loop.submit(slow)
    for _ in range(after):
        loop.step()
    backlog.add(100)
    assert backlog.full
    others = [make_request(PROMPT, max_tokens=8), make_request("another one", max_tokens=20)]
    for request in others:
        loop.submit(request)
    for _ in range(60):
        if not loop.step():
            break
    exact(loop, *others)
    assert len(loop.output(slow)) < 8 and loop.scheduler.held and loop.scheduler.has_work
    loop.scheduler.check_integrity()
    backlog.add(-1)
    assert not loop.scheduler.held
    loop.run()
    exact(loop, slow, *others)


def test_a_held_request_can_be_aborted() -> None:
    backlog = Backlog(most=1)
    loop = LoopBuilder().loop()
    slow = capturing(PROMPT, backlog, max_tokens=8)
    loop.submit(slow)
    loop.step()
    backlog.add(1)
    loop.step()
    loop.take(loop.scheduler.abort(slow.id))
    loop.run()
    assert not loop.scheduler.held


def test_a_disk_may_take_longer_than_a_copy_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "STALL_SECONDS", 0.0)
    backlog = Backlog(most=1)
    loop = LoopBuilder().loop()
    loop.submit(capturing(PROMPT, backlog, max_tokens=8))
    loop.step()
    backlog.add(1)
    for _ in range(5):
        loop.step()
    assert loop.scheduler.held
    backlog.add(-1)
    loop.run()
