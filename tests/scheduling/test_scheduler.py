"""What each rule of the scheduler does, one at a time; the fake runner checks every plan that it is given."""

from __future__ import annotations

import time

import numpy as np
import pytest

from helpers.fakes import EOS, FakeModel, make_request
from helpers.scheduling import Loop, LoopBuilder, NoReserve, exact
from helpers.thorough import by_default
from rekindle._src.core.prefix import Prefix
from rekindle._src.core.records import FinishReason, Request, RowResult, Status, StepPlan, StepResult
from rekindle._src.core.report_kinds import LOGPROBS, PROMPT_LOGPROBS
from rekindle.errors import InvalidRequest, OutOfPages, PromptTooLong, QueueFull, StepFailed


def submit(loop: Loop, *requests: Request) -> None:
    for request in requests:
        loop.submit(request)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_gives_what_each_gives_alone(overlap: bool) -> None:
    loop = LoopBuilder(overlap=overlap, model=FakeModel(eos_rate=0.05)).loop()
    requests = [make_request(f"prompt {index} " * (index + 1), max_tokens=5 + index) for index in range(10)]
    submit(loop, *requests)
    loop.run()
    exact(loop, *requests)


def test_decode_rows_come_before_prefill_chunks_within_the_budget() -> None:
    loop = LoopBuilder(max_tokens_per_step=8, overlap=False).loop()
    short, long = make_request("ab", max_tokens=9), make_request("x" * 20, max_tokens=2)
    submit(loop, short)
    loop.step()
    submit(loop, long)
    loop.run()
    exact(loop, short, long)
    shape = [(len(plan.decode), plan.prefill_tokens) for plan in loop.runner.plans]
    assert shape[:4] == [(0, 2), (1, 7), (1, 7), (1, 6)]
    assert shape[4] == (2, 0)


def test_beside_decode_rows_prompts_get_less_of_a_step() -> None:
    loop = LoopBuilder(max_tokens_per_step=16, overlap=False).steps(max_beside_decode=4).loop()
    short, long, last = make_request("ab", max_tokens=4), make_request("x" * 20, max_tokens=2), make_request("y" * 16)
    submit(loop, short)
    loop.step()
    submit(loop, long)
    loop.run()
    submit(loop, last)
    loop.run()
    exact(loop, short, long, last)
    shape = [(len(plan.decode), plan.prefill_tokens) for plan in loop.runner.plans]
    assert shape[:5] == [(0, 2), (1, 4), (1, 4), (1, 4), (0, 8)]
    assert (0, 16) in shape, "nobody waits: the whole step"


def test_at_most_max_prefill_rows_sequences_prefill_in_one_step() -> None:
    loop = LoopBuilder(max_prefill_rows=2, max_requests=4).loop()
    submit(loop, *(make_request(f"{index}!", max_tokens=1) for index in range(4)))
    loop.run()
    assert [len(plan.prefill) for plan in loop.runner.plans] == [2, 2]


def test_a_budget_smaller_than_the_batch_starves_nobody() -> None:
    loop = LoopBuilder(max_tokens_per_step=2, max_requests=4).loop()
    requests = [make_request(f"request {index}", max_tokens=6) for index in range(8)]
    submit(loop, *requests)
    loop.run()
    exact(loop, *requests)


def test_sixteen_requests_that_share_a_prefix_compute_it_once() -> None:
    loop = LoopBuilder(
        pages=600, page_size=16, max_requests=16, max_tokens_per_step=512, max_prefill_rows=16, max_model_len=2048
    ).loop()
    prefix = "p" * 1024
    requests = [make_request(f"{prefix}question {index:02}", max_tokens=4) for index in range(16)]
    submit(loop, *requests)
    loop.run()
    exact(loop, *requests)
    computed = sum(loop.runner.computed.values())
    assert computed <= 1024 + 16 * (11 + 4), f"{computed} tokens were computed"
    # "question 0" is that of nine others, and "question " that of six: the first one's page is copied.
    assert loop.scheduler.statistics().cached_tokens == 15 * 1024 + 9 * 10 + 6 * 9


def test_siblings_of_one_prompt_share_it() -> None:
    loop = LoopBuilder(max_requests=4, pages=64).loop()
    siblings = [
        make_request("a prompt of forty-one tokens, more or less", seed=seed, temperature=1.0, max_tokens=6)
        for seed in range(4)
    ]
    submit(loop, *siblings)
    loop.run()
    exact(loop, *siblings)
    assert [loop.events[request.id][-1].cached_tokens for request in siblings] == [0, 40, 40, 40]


def test_a_small_shared_beginning_is_not_waited_for() -> None:
    loop = LoopBuilder(max_requests=2, max_tokens_per_step=128).loop()
    one, two = (make_request("template" + letter * 40, max_tokens=2) for letter in "ab")
    submit(loop, one, two)
    loop.run()
    assert len(loop.runner.plans[0].prefill) == 2
    exact(loop, one, two)


def test_a_wait_for_a_prefix_ends_when_its_owner_is_aborted() -> None:
    loop = LoopBuilder(max_tokens_per_step=32).loop()
    owner, waiter = (make_request("the same long prompt, twice", max_tokens=3) for _ in range(2))
    submit(loop, owner, waiter)
    loop.step()
    assert loop.scheduler.statistics().parked == 1
    explanation = loop.scheduler.explain(waiter.id)
    assert explanation is not None and explanation.waits_for == owner.id
    assert f"waits for request {owner.id}" in str(explanation)
    loop.take(loop.scheduler.abort(owner.id))
    loop.run()
    exact(loop, waiter)


def test_a_chat_that_goes_on_finds_what_it_generated() -> None:
    loop = LoopBuilder().loop()
    first = make_request("Tell me a story", max_tokens=30)
    submit(loop, first)
    loop.run()
    history = [*first.token_ids.tolist(), *loop.output(first)]
    second = make_request([*history, 33, 34], max_tokens=5)
    submit(loop, second)
    loop.run()
    exact(loop, second)
    # The last token's keys were never computed, so 44 positions were: 5 pages of 8.
    assert loop.events[second.id][-1].cached_tokens == 40


def test_without_a_cache_nothing_is_shared_or_awaited() -> None:
    loop = LoopBuilder(max_tokens_per_step=256).cache(prefixes=False).loop()
    requests = [make_request("the same long prompt, twice", max_tokens=3) for _ in range(2)]
    submit(loop, *requests)
    loop.run()
    exact(loop, *requests)
    assert len(loop.runner.plans[0].prefill) == 2
    assert loop.pool.free == loop.pool.total


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_requests_resume_from_the_cache_and_are_exact(overlap: bool) -> None:
    loop = LoopBuilder(pages=12, max_requests=4, overlap=overlap).queue(reserve=NoReserve()).loop()
    requests = [make_request(f"request {index}", max_tokens=40, temperature=1.0, seed=index) for index in range(4)]
    submit(loop, *requests)
    loop.run()
    exact(loop, *requests)
    statistics = loop.scheduler.statistics()
    assert statistics.preemptions > 0
    assert loop.scheduler.explain(requests[0].id).preemptions == 0, "the oldest always progresses"  # type: ignore[union-attr]
    recomputed = sum(loop.runner.computed.values()) - sum(request.prompt_length + 39 for request in requests)
    assert recomputed < statistics.preemptions * 48, "what was published is not computed again"


def test_priority_decides_who_is_preempted() -> None:
    loop = LoopBuilder(pages=8, max_requests=2).queue(policy="priority", reserve=NoReserve()).loop()
    low, high = make_request("low", max_tokens=50, priority=0), make_request("high", max_tokens=50, priority=5)
    submit(loop, low)
    loop.step()
    submit(loop, high)
    loop.run()
    exact(loop, low, high)
    assert loop.scheduler.explain(high.id).preemptions == 0  # type: ignore[union-attr]
    assert loop.scheduler.explain(low.id).preemptions > 0  # type: ignore[union-attr]


def test_the_reserve_learns_from_what_requests_use() -> None:
    loop = LoopBuilder(model=FakeModel(eos_rate=0.5), pages=2000, max_model_len=4096).loop()
    before = loop.scheduler.statistics().reserve_fraction
    submit(loop, *(make_request(f"{index}", max_tokens=1000) for index in range(30)))
    loop.run()
    assert loop.scheduler.statistics().reserve_fraction < before / 2


def test_eos_and_stop_ids_end_a_request_only_after_min_tokens() -> None:
    loop = LoopBuilder(model=FakeModel(eos_rate=1.0), overlap=True).loop()
    eos = make_request("a", max_tokens=9, min_tokens=3)
    stop = make_request("b", max_tokens=9, ignore_eos=True, stop_ids=(EOS,))
    deaf = make_request("c", max_tokens=9, ignore_eos=True)
    submit(loop, eos, stop, deaf)
    loop.run()
    assert (loop.reason(eos), len(loop.output(eos)), loop.output(eos)[-1]) == (FinishReason.EOS, 4, EOS)
    assert (loop.reason(stop), loop.output(stop)) == (FinishReason.STOP, [EOS])
    assert (loop.reason(deaf), loop.output(deaf)) == (FinishReason.LENGTH, [EOS] * 9)


def test_the_scheduler_itself_ignores_ends_before_min_tokens() -> None:
    """Should a device program not mask them, a user-supplied processor for instance."""
    loop = LoopBuilder().loop()
    request = make_request("a", max_tokens=9, min_tokens=2)
    submit(loop, request)
    for _ in range(3):
        plan = loop.scheduler.plan()
        assert plan is not None
        rows = tuple(RowResult(row.request.id, row.epoch, EOS) for row in plan.rows)
        loop.take(*loop.scheduler.commit(StepResult(plan, rows)))
    assert (loop.output(request), loop.reason(request)) == ([EOS] * 3, FinishReason.EOS)


@pytest.mark.parametrize("overlap", [False, True])
def test_max_tokens_is_never_overrun_and_computes_no_row_too_many(overlap: bool) -> None:
    loop = LoopBuilder(overlap=overlap).loop()
    request = make_request("abc", max_tokens=5)
    submit(loop, request)
    loop.run()
    assert (len(loop.output(request)), loop.reason(request)) == (5, FinishReason.LENGTH)
    assert loop.runner.computed[request.id] == 3 + 4


def test_prompt_logprobs_skip_the_cache_and_come_once_each() -> None:
    loop = LoopBuilder(pages=12, max_requests=3, max_tokens_per_step=8).queue(reserve=NoReserve()).loop()
    plain = make_request("the very same prompt", max_tokens=30)
    options = {"max_tokens": 30, "temperature": 1.0, "prompt_logprobs": 2, "logprobs": 1}
    starts = (0, 13)
    scored = [
        make_request("the very same prompt", seed=seed, logprob_start=start, **options)
        for seed, start in enumerate(starts)
    ]
    submit(loop, plain, *scored)
    loop.run()
    exact(loop, plain, *scored)
    for request, start in zip(scored, starts, strict=True):
        events = loop.events[request.id]
        expected = request.token_ids[max(1, start) :].tolist()
        assert [score.token_id for event in events for score in PROMPT_LOGPROBS.of(event)] == expected
        assert [score.token_id for event in events for score in LOGPROBS.of(event)] == loop.output(request)
    assert loop.scheduler.statistics().preemptions > 0, "the load is meant to preempt"


def test_a_failed_step_ends_its_requests_only() -> None:
    def fail(plan: StepPlan) -> RuntimeError | None:
        return RuntimeError("no such kernel") if plan.step == 4 else None

    loop = LoopBuilder(max_requests=2).steps(fail=fail).loop()
    requests = [make_request(f"request {index}", max_tokens=8) for index in range(4)]
    submit(loop, *requests)
    loop.run()
    for request in requests[:2]:
        last = loop.events[request.id][-1]
        assert last.finish_reason is FinishReason.FAILED and isinstance(last.error, StepFailed)
        assert isinstance(last.error.__cause__, RuntimeError) and "no such kernel" in str(last.error)
        assert loop.scheduler.status(request.id) is Status.FAILED
    exact(loop, *requests[2:])


def test_a_refused_request_changes_nothing() -> None:
    loop = LoopBuilder(pages=4, page_size=8, max_model_len=64).queue(max_queue=2).loop()
    with pytest.raises(PromptTooLong, match="max_model_len is 64"):
        loop.scheduler.submit(make_request("x" * 64))
    with pytest.raises(OutOfPages, match="33 tokens need 5 KV pages of 8, 4 can be used"):
        loop.scheduler.submit(make_request("x" * 33))
    submit(loop, make_request("a", id="a"), make_request("b", id="b"))
    with pytest.raises(QueueFull, match="2 requests wait and max_queue is 2"):
        loop.scheduler.submit(make_request("c"))
    with pytest.raises(InvalidRequest, match="still alive"):
        loop.scheduler.submit(make_request("d", id="a"))
    assert loop.scheduler.statistics().submitted == 2
    loop.run()


def test_pinned_pages_are_never_promised_to_a_request() -> None:
    loop = LoopBuilder(pages=8, page_size=8).loop()
    system = make_request("s" * 33, max_tokens=1)
    submit(loop, system)
    loop.run()
    assert loop.scheduler.pin(Prefix(system.token_ids)) == 32
    with pytest.raises(OutOfPages, match="4 can be used"):
        loop.scheduler.submit(make_request("x" * 40))
    stranger = make_request("x" * 20, max_tokens=60)
    friend = make_request("s" * 40, max_tokens=60)
    submit(loop, stranger, friend)
    loop.run()
    assert (len(loop.output(stranger)), loop.reason(stranger)) == (4 * 8 + 1 - 20, FinishReason.CONTEXT)
    assert (len(loop.output(friend)), loop.reason(friend)) == (8 * 8 + 1 - 40, FinishReason.CONTEXT)
    large = make_request("y" * 60, max_tokens=2)
    with pytest.raises(OutOfPages):
        loop.scheduler.submit(large)
    loop.scheduler.unpin(Prefix(system.token_ids))
    submit(loop, large)
    with pytest.raises(OutOfPages, match="Pin later or less"):
        loop.scheduler.pin(Prefix(system.token_ids))
    loop.run()
    exact(loop, large)


def test_flushing_and_new_weights_recompute_without_losing_anybody() -> None:
    loop = LoopBuilder(overlap=True).loop()
    requests = [make_request(f"request {index}", max_tokens=12) for index in range(3)]
    submit(loop, *requests)
    for _ in range(4):
        loop.step()
    loop.scheduler.flush_cache(b"other weights 16", recompute=True)
    assert {loop.scheduler.status(request.id) for request in requests} == {Status.PREEMPTED}
    loop.run()
    exact(loop, *requests)
    late = make_request("request 0", max_tokens=1)
    submit(loop, late)
    loop.run()
    assert loop.events[late.id][-1].cached_tokens == 8


def test_requests_are_told_that_they_wait_for_pages_or_for_an_older_one() -> None:
    loop = LoopBuilder(max_requests=4, overlap=False, pages=6).loop()
    requests = [make_request(letter * 20, max_tokens=20) for letter in "abc"]
    submit(loop, *requests)
    loop.step()
    _, second, third = (str(loop.scheduler.explain(request.id)) for request in requests)
    assert "pages minus cached ones" in second and "0 older requests wait" in second
    assert "it has not had its turn; 1 older requests wait" in third


def test_status_and_explanations_follow_a_request() -> None:
    loop = LoopBuilder(max_requests=1, overlap=False, max_tokens_per_step=8).loop()
    first, second = make_request("a long first prompt", max_tokens=2), make_request("b", max_tokens=1)
    submit(loop, first, second)
    scheduler = loop.scheduler
    assert scheduler.status(first.id) is Status.QUEUED
    loop.step()
    assert scheduler.status(first.id) is Status.PREFILL
    assert "8 of 19 positions" in str(scheduler.explain(first.id))
    waiting = scheduler.explain(second.id)
    assert waiting is not None and waiting.status is Status.QUEUED
    assert "it finds all slots taken (1); 0 older requests wait" in str(waiting)
    loop.step()
    loop.step()
    assert scheduler.status(first.id) is Status.DECODE
    loop.run()
    assert scheduler.status(first.id) is Status.FINISHED
    ended = scheduler.explain(first.id)
    assert ended is not None and ended.generated_tokens == 2
    assert scheduler.status("nobody") is None and scheduler.explain("nobody") is None


@pytest.mark.clock
@pytest.mark.parametrize("policy", by_default(["lpm", "fcfs", "sjf"]))
def test_ten_thousand_waiting_requests_cost_a_plan_nothing(policy: str) -> None:
    def plan_time(queued: int) -> float:
        loop = LoopBuilder(pages=400, max_requests=8, max_model_len=200).queue(max_queue=20_000, policy=policy).loop()
        for index in range(8 + queued):
            loop.submit(make_request(np.arange(index, index + 20) % 97, max_tokens=150))
        spent = []
        for _ in range(60):
            start = time.thread_time()
            plan = loop.scheduler.plan()
            spent.append(time.thread_time() - start)
            assert plan is not None
            rows = tuple(RowResult(row.request.id, row.epoch, 5 if row.samples else None) for row in plan.rows)
            loop.scheduler.commit(StepResult(plan, rows))
        return sorted(spent)[30]

    assert plan_time(10_000) < 3 * plan_time(100) + 0.0002
