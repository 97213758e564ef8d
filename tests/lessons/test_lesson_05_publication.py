"""A page is published only after the step that fills it was committed; identical requests in one batch agree.

Upstream: https://github.com/GeeeekExplorer/nano-vllm/issues/208
A second request of the batch hit blocks that were not computed yet.
Upstream: https://github.com/vllm-project/vllm/pull/37152
The same in vLLM, with wrong tokens at temperature 0.
"""

from __future__ import annotations

import pytest

from helpers.fakes import make_request
from helpers.scheduling import LoopBuilder


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("waiting", [True, False])
def test_lesson_05_identical_requests_in_one_batch_agree_with_the_solo_output(overlap: bool, waiting: bool) -> None:
    loop = LoopBuilder(overlap=overlap, max_requests=4, max_tokens_per_step=24).loop()
    if not waiting:  # all four compute the same pages in the same steps, and three of each are merged away
        loop.scheduler._admission._park = lambda sequence: False  # type: ignore[method-assign]
    requests = [make_request("an identical prompt of some length", max_tokens=12) for _ in range(4)]
    for request in requests:
        loop.submit(request)
    loop.run()
    for request in requests:
        assert loop.output(request) == loop.model.generate(request)
    merged = loop.cache.statistics().merged_pages
    assert merged > 0, "identical outputs fill identical pages"
    assert loop.pool.cached == (34 + 11) // 8, "each page is kept once"


def test_lesson_05_nothing_is_in_the_tree_before_its_step_was_committed() -> None:
    loop = LoopBuilder(overlap=True, max_tokens_per_step=16).loop()
    loop.submit(make_request("x" * 40, max_tokens=2))
    in_flight = []
    for committed in range(3):
        while len(in_flight) < 2:
            plan = loop.scheduler.plan()
            assert plan is not None
            in_flight.append(loop.runner.dispatch(plan))
        assert len(loop.cache) == committed * 2, "16 tokens are two pages, and two steps are in flight"
        loop.scheduler.commit(loop.runner.fetch(in_flight.pop(0)))


def test_lesson_05_a_merged_page_stays_until_no_step_in_flight_reads_it() -> None:
    loop = LoopBuilder(overlap=True, page_size=8, max_requests=2).loop()
    loop.scheduler._admission._park = lambda sequence: False  # type: ignore[method-assign]
    for _ in range(2):
        loop.submit(make_request("sixteen tokens !", max_tokens=8))
    flights = []
    for _ in range(2):
        plan = loop.scheduler.plan()
        assert plan is not None
        flights.append(loop.runner.dispatch(plan))
    loop.scheduler.commit(loop.runner.fetch(flights[0]))
    assert loop.cache.statistics().merged_pages == 2
    assert loop.pool.held == 4 + 2, "the step in flight still reads the duplicates"
    loop.scheduler.commit(loop.runner.fetch(flights[1]))
    assert loop.pool.held == 2 + 2


def test_lesson_05_a_resumed_chunked_prefill_reads_what_it_wrote() -> None:
    loop = LoopBuilder(max_tokens_per_step=5, max_requests=2).loop()
    one, two = (make_request("a prompt that is computed in many chunks", max_tokens=4) for _ in range(2))
    for request in (one, two):
        loop.submit(request)
        loop.step()
    loop.run()
    assert loop.output(one) == loop.output(two) == loop.model.generate(one)
