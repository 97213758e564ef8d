"""What is broken of one request ends that request: its pages are never used again, and others go on."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from helpers.fakes import DictTier, make_request
from helpers.scheduling import Loop, LoopBuilder, exact
from rekindle._src.core.records import FinishReason, Request, TokenEvent
from rekindle._src.scheduling.sequence import Sequence
from rekindle.errors import OutOfPages, RequestFailed


class Lenient(Loop):
    """A loop to which a request's failed assertion is an event like others."""

    def take(self, *events: TokenEvent | None) -> None:
        for event in events:
            if event is not None:
                past = self.events[event.request_id]
                assert not past or past[-1].finish_reason is None, f"{event} after the end"
                past.append(event)


def sequence_of(loop: Loop, request: Request) -> Sequence:
    return loop.scheduler.alive[request.id]


def _miscounted(loop: Loop, sequence: Sequence) -> None:
    loop.pool._refs[sequence.pages.ids[-1]] -= 1


def _freed(loop: Loop, sequence: Sequence) -> None:
    loop.pool._refs[sequence.pages.ids[-1]] -= 1
    loop.pool._free.insert(0, int(sequence.pages.ids[-1]))  # handed out last


def _not_running(loop: Loop, sequence: Sequence) -> None:
    loop.scheduler.running_set.running.remove(sequence)


def _no_claims(loop: Loop, sequence: Sequence) -> None:
    resolve = loop.scheduler._admission._claims.resolve

    def resolved(of: Sequence, *pages: int) -> list[tuple[Sequence, int, int]]:
        assert of is not sequence, "it has none"
        return resolve(of, *pages)

    loop.scheduler._admission._claims.resolve = resolved  # type: ignore[method-assign]


def _unknown_sides(loop: Loop, sequence: Sequence) -> None:
    def release(of: Sequence) -> None:
        assert of is not sequence, "it has none"

    loop.scheduler._sides.release = release  # type: ignore[method-assign]


BREAKS = [_miscounted, _freed, _not_running, _no_claims, _unknown_sides]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("end", ["abort", "finish"])
@pytest.mark.parametrize("breaks", BREAKS, ids=lambda breaks: breaks.__name__.strip("_"))
def test_a_broken_request_ends_alone_and_its_pages_are_not_used_again(
    breaks: Callable[[Loop, Sequence], None], end: str, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if end == "finish" and breaks is _not_running:
        return  # no step has it any more
    loop = LoopBuilder(overlap=overlap, pages=64, max_requests=3).loop(Lenient)
    bad = make_request("b" * 21, max_tokens=12)
    neighbours = [make_request(f"neighbour {index} " * 2, max_tokens=20) for index in range(4)]
    for request in (neighbours[0], bad, *neighbours[1:]):
        loop.submit(request)
    for _ in range(4):
        loop.step()
    sequence = sequence_of(loop, bad)
    pages = {*sequence.pages.ids.tolist()}
    assert pages and loop.output(bad)
    breaks(loop, sequence)
    with caplog.at_level(logging.ERROR, "rekindle.session"):
        if end == "abort":
            loop.engine.abort(bad.id)
        while loop.step():
            assert not pages & {
                page for other in loop.scheduler.alive.values() for page in other.pages.ids.tolist()
            } or (bad.id in loop.scheduler.alive)
    assert not loop.scheduler.has_work
    last = loop.events[bad.id][-1]
    assert last.finish_reason in (FinishReason.FAILED, FinishReason.ABORTED if end == "abort" else None)
    assert len(caplog.records) == 1 and bad.id in caplog.text
    exact(loop, *neighbours)
    assert pages <= quarantined(loop) and loop.pool.quarantined == len(quarantined(loop))
    loop.scheduler.running_set.check_integrity()
    loop.cache.check_integrity()
    loop.pool.check_integrity()
    assert not any(node.page in pages for node in loop.cache), "their content is not believed"
    later = [
        make_request("b" * 21, max_tokens=12),
        *(make_request(f"{index}" * 70, max_tokens=9) for index in range(9)),
    ]
    for request in later:
        loop.submit(request)
    while loop.step():
        assert not pages & {page for other in loop.scheduler.alive.values() for page in other.pages.ids.tolist()}
    exact(loop, *later)


def quarantined(loop: Loop) -> set[int]:
    return {*np.flatnonzero(loop.pool._refs > 1 << 20).tolist()}


def test_requests_that_share_a_miscounted_page_fail_and_no_others() -> None:
    loop = LoopBuilder(pages=64, max_requests=4).loop(Lenient)
    prompt = "s" * 24
    first = make_request(prompt, max_tokens=2)
    loop.submit(first)
    loop.run()
    sharing = [make_request(prompt + end, max_tokens=16) for end in "tu"]
    other = make_request("another", max_tokens=30)
    for request in (*sharing, other):
        loop.submit(request)
    for _ in range(4):
        loop.step()
    page = int(sequence_of(loop, sharing[0]).pages.ids[0])
    assert page == sequence_of(loop, sharing[1]).pages.ids[0]
    loop.pool._refs[page] = 1  # as if none but the tree had it
    loop.engine.abort(sharing[0].id)
    while loop.step():
        pass
    exact(loop, other)
    error = loop.events[sharing[1].id][-1].error
    assert isinstance(error, RequestFailed) and "its bookkeeping was broken" in str(error)
    assert not loop.scheduler.has_work and page in quarantined(loop)


def test_a_request_that_waits_for_the_prefix_of_a_broken_one_computes_it() -> None:
    loop = LoopBuilder(pages=64).loop(Lenient)
    bad, waiting = make_request("p" * 60, max_tokens=4), make_request("p" * 60 + "q", max_tokens=4)
    loop.submit(bad)
    loop.submit(waiting)
    for _ in range(2):
        loop.step()
    assert sequence_of(loop, waiting).queue.waits_for is sequence_of(loop, bad)
    _miscounted(loop, sequence_of(loop, bad))
    loop.engine.abort(bad.id)
    while loop.step():
        pass
    exact(loop, waiting)


def test_requests_that_do_not_fit_into_what_is_left_are_told_so() -> None:
    loop = LoopBuilder(pages=10, max_requests=1).loop(Lenient)
    bad, long = make_request("b" * 20, max_tokens=4), make_request("l" * 60, max_tokens=9)
    shorter, short = make_request("m" * 50, max_tokens=20, ignore_eos=True), make_request("s", max_tokens=9)
    for request in (bad, long, shorter, short):
        loop.submit(request)
    loop.step()
    _miscounted(loop, sequence_of(loop, bad))
    loop.engine.abort(bad.id)
    while loop.step():
        pass
    assert not loop.scheduler.has_work
    assert isinstance(loop.events[long.id][-1].error, OutOfPages)
    exact(loop, short)
    assert loop.output(shorter) == loop.model.generate(shorter)[:7], "as many as 7 pages of 8 have room for"
    assert loop.reason(shorter) is FinishReason.CONTEXT
    with pytest.raises(OutOfPages):
        loop.submit(make_request("l" * 60, max_tokens=9))


def test_pages_that_were_read_back_and_are_miscounted_are_in_no_tier_s_way() -> None:
    loop = LoopBuilder(pages=12, page_size=8, max_requests=3).cache(host_tier=DictTier()).loop(Lenient)
    request = make_request("p" * 33, max_tokens=2)
    loop.submit(request)
    loop.run()
    for index in range(4):
        loop.submit(make_request(f"{index}" * 60, max_tokens=2))
        loop.run()
    bad, other = make_request("p" * 33 + "x", max_tokens=8), make_request("neighbour", max_tokens=12)
    loop.submit(other)
    loop.submit(bad)
    for _ in range(3):
        loop.step()
    _miscounted(loop, sequence_of(loop, bad))
    loop.engine.abort(bad.id)
    while loop.step():
        pass
    exact(loop, other)
    again = make_request("p" * 33, max_tokens=2)
    loop.submit(again)
    while loop.step():
        pass
    exact(loop, again)
