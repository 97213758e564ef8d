"""Where two requests part within a page, the second one gets a copy of the first one's page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import pytest

from helpers.fakes import DictTier, make_request
from helpers.scheduling import Loop, LoopBuilder, NoReserve, Sizes, exact
from rekindle._src.core.records import Request, Status, StepPlan

PAGE = 16


def opened(**sizes: Unpack[Sizes]) -> LoopBuilder:
    builder = LoopBuilder(page_size=PAGE, max_requests=8, max_prefill_rows=8, max_tokens_per_step=128)
    return builder.sizes(**sizes)


def run(loop: Loop, *requests: Request) -> list[int]:
    """Run requests, compare each with its output alone, and return how many tokens of each came from the cache."""
    for request in requests:
        loop.submit(request)
    loop.run()
    exact(loop, *requests)
    return [loop.events[request.id][-1].cached_tokens for request in requests]


def choices(prompt: str, ends: Sequence[str] = ("one", "two", "three", "four"), **options: Any) -> list[Request]:
    return [make_request(prompt + end, max_tokens=2, **options) for end in ends]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [10, 16 + 9, 48 + 15])
def test_the_end_of_a_prompt_is_computed_once(overlap: bool, length: int) -> None:
    loop = opened(overlap=overlap).loop()
    assert run(loop, *choices(("a prompt, " * 10)[:length])) == [0, length, length, length]
    assert sum(loop.runner.computed.values()) == length + len("onetwothreefour") + 4  # and a token of each


def test_siblings_compute_the_last_token_of_their_prompt_alone() -> None:
    loop = opened().loop()
    siblings = [
        make_request("a prompt of forty-one tokens, more or less", seed=seed, max_tokens=20) for seed in range(4)
    ]
    assert run(loop, *siblings) == [0, 41, 41, 41]
    assert sum(len(plan.prefill) for plan in loop.runner.plans) == 1


def test_what_is_copied_is_what_the_request_may_reuse() -> None:
    """Positions whose log-probabilities are wanted are computed, not copied."""
    loop = opened().loop()
    scored = choices("a prompt of some tokens, or a few more", prompt_logprobs=1, logprob_start=30)
    assert run(loop, *scored) == [0, 29, 29, 29]


def test_pages_that_are_waited_for_are_not_in_the_way() -> None:
    """More requests hold pages to copy than there are pages: they compute what they share instead."""
    for pages in range(4, 12):
        loop = opened(pages=pages, max_requests=4).queue(reserve=NoReserve()).loop()
        run(loop, *(one for index in range(8) for one in choices(f"{index} is a prompt of some tokens")))
        assert loop.pool.free + loop.pool.cached == pages


def test_a_request_that_ends_while_it_waits_gives_the_page_back() -> None:
    loop = opened(max_requests=2).loop()
    first, second, third = choices("a prompt of some tokens", ["one", "two", "six"])
    for request in (first, second, third):
        loop.submit(request)
    while loop.scheduler.status(first.id) is not Status.FINISHED:
        loop.step()
    loop.scheduler.abort(third.id)
    loop.run()
    assert loop.output(second) == loop.model.generate(second)
    loop.cache.evict(loop.pool.cached)
    assert loop.pool.free == loop.pool.total


@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_is_copied_across_new_weights(recompute: bool) -> None:
    for steps in range(1, 5):
        loop = opened(max_requests=2).loop()
        requests = choices("a prompt of some tokens")
        for request in requests:
            loop.submit(request)
        for _ in range(steps):
            loop.step()
        loop.scheduler.flush_cache(b"other weights 16", recompute=recompute)
        loop.runner.plans.clear()
        loop.step()
        assert not any(plan.copies for plan in loop.runner.plans)
        loop.run()
        exact(loop, *requests)


def test_a_failed_step_lends_nothing() -> None:
    def fail(plan: StepPlan) -> BaseException | None:
        return RuntimeError("the device is gone") if plan.step == 0 else None

    loop = opened().steps(fail=fail).loop()
    first, *others = choices("a prompt of some tokens")
    for request in (first, *others):
        loop.submit(request)
    loop.run()
    assert loop.scheduler.status(first.id) is Status.FAILED
    for request in others:
        assert loop.output(request) == loop.model.generate(request)


def test_what_came_before_is_copied_from_the_tree() -> None:
    """Questions after the same examples, one at a time: their pages differ in the middle."""
    loop = opened().loop()
    examples = "these are examples, and they are behind one another: "
    assert len(examples) % PAGE == 5
    assert run(loop, make_request(examples + "a question of some length", max_tokens=2)) == [0]
    assert run(loop, make_request(examples + "the second one", max_tokens=2)) == [len(examples)]
    assert run(loop, make_request(examples + "a quest", max_tokens=2, salt="mine")) == [0]
    loop.cache.evict(loop.pool.cached)
    assert run(loop, make_request(examples + "the third one", max_tokens=2)) == [0]


def test_salts_share_nothing() -> None:
    loop = opened().loop()
    assert run(loop, *choices("a prompt of some", ["one"]), *choices("a prompt of some", ["two"], salt="mine")) == [
        0,
        0,
    ]


def test_copies_stay_in_their_data_shard() -> None:
    loop = opened(pages=32, max_requests=4).shards(2).loop()
    cached = run(loop, *(one for index in range(6) for one in choices(f"{index} is a prompt of some tokens")))
    assert 28 in cached
    first = loop.pools[1].num_pages - 33
    copies = [copy for plan in loop.runner.plans for copy in plan.copies]
    assert copies and all((copy.source < first) == (copy.page < first) for copy in copies)


def test_a_sleeping_session_lends_nothing() -> None:
    loop = opened(max_requests=2, overlap=False).cache(host_tier=DictTier(100)).loop()
    requests = choices("a prompt of some tokens")
    for request in requests:
        loop.submit(request)
    while loop.scheduler.status(requests[0].id) is not Status.FINISHED:
        loop.step()
    while loop.scheduler.statistics().steps_in_flight:
        loop.step()
    for move in loop.scheduler.vacate():
        assert loop.runner.host_tier is not None
        loop.runner.host_tier.put(move.digest, (loop.runner.memory[move.page][None].copy(),))
    loop.scheduler.vacated()
    assert loop.pool.free == loop.pool.total
    loop.runner.memory[:] = 0xDEAD
    loop.run()
    exact(loop, *requests)
