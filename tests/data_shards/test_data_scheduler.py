"""Several data shards under one scheduler: where requests are placed, how they move, and that outputs are exact."""

from __future__ import annotations

import random
from typing import Any

import pytest

from helpers.fakes import DictTier, EchoModel, FakeModel, make_request
from helpers.scheduling import Loop, LoopBuilder, NoReserve, exact
from helpers.thorough import by_default
from rekindle._src.core.config import POLICIES
from rekindle._src.core.prefix import Prefix
from rekindle._src.core.records import FinishReason, Request, Status
from rekindle.errors import InvalidRequest, OutOfPages, QueueFull


def shard_of(loop: Loop, request: Request) -> int:
    return next(index for index, shard in enumerate(loop.shards) if shard.has(request.id))


def submitted(loop: Loop, prompt: str, **sampling: Any) -> Request:
    request = make_request(prompt, **{"max_tokens": 4, **sampling})
    loop.submit(request)
    return request


def test_a_step_has_rows_of_all_shards_with_slots_and_pages_of_their_own() -> None:
    loop = LoopBuilder(pages=10, max_requests=2, overlap=False).shards(3).loop()
    requests = [submitted(loop, f"{number} is a prompt") for number in range(6)]
    assert sorted(shard_of(loop, request) for request in requests) == [0, 0, 1, 1, 2, 2]
    loop.step()
    plan = loop.runner.plans[0]
    assert {row.slot // 2 for row in plan.rows} == {0, 1, 2}
    assert all(page // 11 == row.slot // 2 and page % 11 for row in plan.rows for page in row.pages.tolist())
    loop.run()
    exact(loop, *requests)
    assert all(pool.held == 0 for pool in loop.pools)


def test_no_shard_exceeds_what_one_program_holds() -> None:
    loop = LoopBuilder(max_requests=3, max_tokens_per_step=16, max_prefill_rows=2).shards(2).loop()
    requests = [submitted(loop, "a longer prompt, number " + str(number)) for number in range(9)]
    loop.run()
    exact(loop, *requests)
    for plan in loop.runner.plans:
        for shard in range(2):
            rows = [row for row in plan.rows if row.slot // 3 == shard]
            prefill = [row for row in plan.prefill if row.slot // 3 == shard]
            assert sum(row.length for row in rows) <= 16 and len(prefill) <= 2 and len(rows) <= 3


def test_the_shard_that_knows_a_prompt_gets_the_next_turn() -> None:
    loop = LoopBuilder(page_size=8).shards(3).loop()
    text = "the beginning of a conversation " * 12
    first = submitted(loop, text)
    other = submitted(loop, "something else")
    assert (shard_of(loop, first), shard_of(loop, other)) == (0, 1)
    loop.run()
    for number in range(3):  # nothing runs, so that the first shard would be as good as any other
        again = submitted(loop, text + f"turn {number}")
        elsewhere = submitted(loop, f"{number}: something new")
        assert shard_of(loop, again) == 0 and shard_of(loop, elsewhere) == 1
        loop.run()
        assert loop.events[again.id][-1].cached_tokens >= len(text) // 8 * 8


def test_a_short_common_beginning_does_not_gather_all_requests_on_one_shard() -> None:
    loop = LoopBuilder(max_requests=8).shards(2).loop()
    stem = "You are helpful."  # two pages
    loop.submit(make_request(stem + "!", max_tokens=2))
    loop.run()
    requests = [submitted(loop, stem + f" {number}") for number in range(8)]
    assert sorted(shard_of(loop, request) for request in requests) == [0] * 4 + [1] * 4
    loop.run()
    exact(loop, *requests)


def test_a_prefix_that_is_being_computed_counts_as_known() -> None:
    loop = LoopBuilder(max_tokens_per_step=64, max_requests=4).shards(2).loop()
    text = "a long text that two requests share " * 20
    submitted(loop, text)
    loop.step()
    assert shard_of(loop, submitted(loop, text + "and more")) == 0


def test_an_idle_shard_takes_what_waits_for_another_one() -> None:
    loop = LoopBuilder(max_requests=2, overlap=False).shards(2).loop()
    long = [submitted(loop, f"number {number}", max_tokens=40, ignore_eos=True) for number in range(2)]
    short = [submitted(loop, f"short {number}", max_tokens=1) for number in range(2)]
    for _ in range(3):
        loop.step()
    exact(loop, *short)
    # Four on the first shard alone, as if the others had just ended.
    more = [make_request(f"more {number}", max_tokens=3) for number in range(4)]
    for request in more:
        loop.events[request.id] = []
        loop.shards[0].submit(request)
    loop.run()
    exact(loop, *long, *more)
    scheduler: Any = loop.scheduler
    assert scheduler.moved


def test_a_request_that_its_own_shard_will_admit_stays_there() -> None:
    """Pages that are cached for it would be lost elsewhere; a budget that is spent comes back with the next step."""
    loop = LoopBuilder(max_requests=4, max_tokens_per_step=8, overlap=False).shards(2).loop()
    for number in range(4):
        request = make_request(f"{number} a prompt of several steps", max_tokens=2)
        loop.events[request.id] = []
        loop.shards[0].submit(request)
    loop.run()
    scheduler: Any = loop.scheduler
    assert not scheduler.moved


@pytest.mark.parametrize("policy", POLICIES)
def test_a_preempted_request_goes_on_where_there_is_room(policy: str) -> None:
    """Its tokens so far take several steps of prefill there."""
    builder = LoopBuilder(pages=8, page_size=4, max_requests=2, max_tokens_per_step=4)
    loop = builder.shards(2).queue(policy=policy, reserve=NoReserve()).loop()
    requests = [make_request(f"{number:07}", max_tokens=20, ignore_eos=True) for number in range(2)]
    for request in requests:  # together they need more pages than one shard has
        loop.events[request.id] = []
        loop.shards[0].submit(request)
    loop.run()
    exact(loop, *requests)
    scheduler: Any = loop.scheduler
    assert scheduler.moved and loop.scheduler.statistics().preemptions


def test_the_queue_is_one() -> None:
    loop = LoopBuilder().shards(2).queue(max_queue=3).loop()
    for number in range(3):
        submitted(loop, f"{number}")
    with pytest.raises(QueueFull, match="3 requests wait and max_queue is 3"):
        loop.scheduler.submit(make_request("4"))
    loop.run()


def test_ids_are_those_of_all_shards() -> None:
    loop = LoopBuilder().shards(2).loop()
    request = submitted(loop, "a")
    with pytest.raises(InvalidRequest, match="still alive"):
        loop.scheduler.submit(make_request("b", id=request.id))
    assert loop.scheduler.status(request.id) is Status.QUEUED
    found = loop.scheduler.explain(request.id)
    assert found is not None and found.id == request.id and found.text.endswith("; data shard 0")
    event = loop.scheduler.abort(request.id)
    assert event is not None and event.finish_reason is FinishReason.ABORTED
    assert loop.scheduler.abort(request.id) is None and loop.scheduler.abort("never") is None


def test_a_pin_holds_in_every_shard_that_has_the_pages() -> None:
    loop = LoopBuilder(pages=8, page_size=8).shards(2).loop()
    prompt = make_request("sixteen letters!", max_tokens=1)
    for shard in loop.shards:
        copy = make_request(prompt.token_ids, max_tokens=1)
        loop.events[copy.id] = []
        shard.submit(copy)
    loop.run()
    assert loop.scheduler.pin(Prefix(prompt.token_ids)) == 16
    assert [cache.pinned_pages for cache in loop.caches] == [2, 2]
    loop.scheduler.check_integrity()
    assert loop.scheduler.unpin(Prefix(prompt.token_ids)) == 16
    assert [cache.pinned_pages for cache in loop.caches] == [0, 0]


def test_a_pin_that_one_shard_refuses_holds_in_none() -> None:
    loop = LoopBuilder(pages=6, page_size=8).shards(2).loop()
    for shard in loop.shards:
        one = make_request("sixteen letters!", max_tokens=1)
        loop.events[one.id] = []
        shard.submit(one)
    loop.run()
    large = make_request("x" * 30, max_tokens=15)  # needs all but one page
    loop.events[large.id] = []
    loop.shards[1].submit(large)
    with pytest.raises(OutOfPages):
        loop.scheduler.pin(Prefix(make_request("sixteen letters!").token_ids))
    assert [cache.pinned_pages for cache in loop.caches] == [0, 0]
    loop.run()


def test_a_request_goes_where_pins_leave_room_for_it() -> None:
    loop = LoopBuilder(pages=6, page_size=8).shards(2).loop()
    one = make_request("sixteen letters!", max_tokens=1)
    loop.events[one.id] = []
    loop.shards[0].submit(one)
    loop.run()
    assert loop.scheduler.pin(Prefix(one.token_ids)) == 16
    large = submitted(loop, "x" * 36, max_tokens=8)
    assert shard_of(loop, large) == 1
    with pytest.raises(OutOfPages):
        loop.scheduler.submit(make_request("x" * 100))
    loop.run()
    exact(loop, large)


def test_a_step_that_fails_ends_its_requests_in_all_shards() -> None:
    loop = LoopBuilder().shards(2).steps(fail=lambda plan: RuntimeError("broken") if plan.step == 1 else None).loop()
    requests = [submitted(loop, f"{number}", max_tokens=8) for number in range(4)]
    loop.run()
    assert all(loop.reason(request) is FinishReason.FAILED for request in requests)
    later = submitted(loop, "later")
    loop.run()
    exact(loop, later)


def test_figures_are_the_sums_of_the_shards() -> None:
    loop = LoopBuilder(pages=12).shards(2).loop()
    for number in range(5):
        submitted(loop, f"{number} is the number of a prompt")
    loop.run()
    found = loop.scheduler.statistics()
    assert len(found.shards) == 2 and found.pages_total == 24 and found.submitted == found.finished == 5
    assert found.steps == len(loop.runner.plans) and found.steps_in_flight == 0
    assert found.cache is not None
    assert found.cache.published_pages == sum(
        one.cache.published_pages for one in found.shards if one.cache is not None
    )
    assert found.generated_tokens == sum(one.generated_tokens for one in found.shards) == 20


def test_other_weights_compute_everything_again_in_all_shards() -> None:
    loop = LoopBuilder(overlap=False).shards(2).loop()
    requests = [submitted(loop, f"number {number}, a prompt", max_tokens=6) for number in range(4)]
    for _ in range(3):
        loop.step()
    loop.scheduler.flush_cache(b"another root", recompute=True)
    assert all(cache.root_key == b"another root" for cache in loop.caches)
    loop.run()
    exact(loop, *requests)


@pytest.mark.parametrize("seed", by_default(range(18), 4))
def test_a_random_load_is_exact(seed: int) -> None:
    draw = random.Random(seed)
    page_size = draw.choice([2, 4, 8])
    model = EchoModel if seed % 3 == 2 else FakeModel
    loop = (
        LoopBuilder(
            pages=draw.choice([14, 20, 40]),
            page_size=page_size,
            max_requests=draw.choice([1, 2, 4]),
            max_tokens_per_step=draw.choice([8, 16, 48]),
            max_prefill_rows=draw.choice([1, 2, 8]),
            overlap=draw.random() < 0.7,
            model=model(eos_rate=draw.choice([0.0, 0.05]), alphabet=tuple(range(6))),
        )
        .shards(draw.choice([2, 2, 3]))
        .drafts(lookup=5 if seed % 3 == 2 else 0, source="suffix" if seed % 3 == 2 and seed % 2 else "auto")
        .cache(prefixes=seed % 6 != 5, host_tier=draw.choice([None, DictTier(20), DictTier()]))
        .queue(policy=draw.choice(POLICIES), seed=seed, max_overtakes=3, reserve=draw.choice([None, NoReserve()]))
        .loop()
    )
    texts = [[draw.randrange(6) for _ in range(60)] for _ in range(4)]
    longest = min(50, (loop.pool.total - 1) * page_size)
    done: list[Request] = []
    aborted: set[str] = set()
    for _ in range(40):
        for _ in range(draw.choice([0, 0, 1, 1, 3])):
            if done and draw.random() < 0.3:  # a chat that goes on
                before = draw.choice(done)
                prompt = [*before.token_ids.tolist(), *loop.output(before), draw.randrange(6)][:longest]
            else:
                prompt = [*draw.choice(texts)[: draw.randint(1, 60)], draw.randrange(6)][:longest]
            for index in range(draw.choice([1, 1, 3])):
                request = make_request(
                    prompt, max_tokens=draw.randint(1, 40), temperature=draw.choice([0.0, 1.0]), seed=index
                )
                loop.submit(request)
                done.append(request)
        for _ in range(draw.randint(0, 8)):
            loop.step()
        if done and draw.random() < 0.1:
            victim = draw.choice(done)
            event = loop.scheduler.abort(victim.id)
            loop.take(event)
            if event is not None:
                aborted.add(victim.id)
        loop.scheduler.check_integrity()
    loop.run()
    assert all(pool.held == 0 for pool in loop.pools)
    for request in done:
        output = loop.output(request)
        plain = loop.model.generate(request)
        whole = min(len(plain), loop.pool.total * page_size + 1 - request.prompt_length)
        assert output == plain[: len(output) if request.id in aborted else whole], f"{request.id} of load {seed}"
