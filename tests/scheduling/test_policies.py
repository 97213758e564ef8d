"""Admission orders of each policy, and the bound on how often a request is overtaken."""

from __future__ import annotations

import dataclasses

import pytest

from helpers.fakes import FakeModel, make_request
from helpers.scheduling import Loop, LoopBuilder, exact
from rekindle._src.core.records import FinishReason, Request
from rekindle._src.scheduling.policies import WINDOW

PAGE = 4


def served(loop: Loop, requests: list[Request]) -> list[str]:
    """Submit together; the ids in the order in which they were first computed."""
    for request in requests:
        loop.submit(request)
    loop.run()
    order: list[str] = []
    for plan in loop.runner.plans:
        order += [row.request.id for row in plan.rows if row.request.id not in order]
    wanted = {request.id for request in requests}
    return [id for id in order if id in wanted]


def one_at_a_time(policy: str, *, max_overtakes: int = 64) -> Loop:
    return LoopBuilder(page_size=PAGE, max_requests=1).queue(policy=policy, seed=3, max_overtakes=max_overtakes).loop()


def text(*pages: int, tail: int = 0) -> list[int]:
    """Whole pages of one token each, and one token that has to be computed."""
    return [page for page in pages for _ in range(PAGE)] + [tail]


def test_fcfs() -> None:
    requests = [make_request("x" * (9 - index), id=f"q{index}", max_tokens=1 + index) for index in range(6)]
    assert served(one_at_a_time("fcfs"), requests) == ["q0", "q1", "q2", "q3", "q4", "q5"]


def of(caller: str, count: int, **options: int) -> list[Request]:
    requests = [make_request("x", id=f"{caller}{index}", max_tokens=1, **options) for index in range(count)]
    return [dataclasses.replace(request, caller=caller) for request in requests]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_callers_take_turns_each_with_its_first(policy: str) -> None:
    """Before that, a caller waited for all thousand requests that another had sent before."""
    requests = [*of("a", 5), *of("b", 2), *of("c", 1)]
    assert served(one_at_a_time(policy), requests) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]


def test_a_caller_that_runs_nothing_needs_not_wait_for_the_end_of_long_texts() -> None:
    """One text of the caller that runs most makes room for it, and is the last of its caller to go on."""
    loop = LoopBuilder(model=FakeModel(), max_requests=3).loop()
    long = [make_request(f"long {index}", id=f"a{index}", max_tokens=200) for index in range(5)]
    long = [dataclasses.replace(request, caller="a") for request in long]
    for request in long:
        loop.submit(request)
    for _ in range(12):
        loop.step()
    short = [dataclasses.replace(make_request(f"short {name}", id=name, max_tokens=4), caller=name) for name in "bc"]
    for request in short:
        loop.submit(request)
    for _ in range(14):
        loop.step()
    assert all(loop.reason(request) is FinishReason.LENGTH for request in short)
    assert 1 <= loop.scheduler.statistics().preemptions <= 2
    oldest, junior = (len(loop.output(request)) for request in (long[0], long[2]))
    assert oldest > 20 > junior, "the oldest text was not interrupted"
    loop.run()
    exact(loop, *long, *short)


def test_no_text_makes_room_where_each_caller_runs_one() -> None:
    loop = LoopBuilder(model=FakeModel(), max_requests=2).loop()
    requests = [dataclasses.replace(make_request(name, id=name, max_tokens=40), caller=name) for name in "abc"]
    own = [make_request(f"own {index}", id=f"own{index}", max_tokens=40) for index in range(3)]
    for request in (*requests, *own):
        loop.submit(request)
    loop.run()
    exact(loop, *requests, *own)
    assert loop.scheduler.statistics().preemptions == 0


def test_a_caller_that_comes_later_has_no_turns_to_make_up_for() -> None:
    loop = one_at_a_time("fcfs")
    for request in of("a", 6):
        loop.submit(request)
    while len(loop.runner.plans) < 3:
        loop.step()
    assert served(loop, [*of("b", 3)]) == ["b0", "b1", "b2"]
    order = [row.request.id for plan in loop.runner.plans for row in plan.rows]
    assert order == ["a0", "a1", "a2", "a3", "b0", "a4", "b1", "a5", "b2"]


def test_requests_that_are_cancelled_take_no_turns() -> None:
    loop = one_at_a_time("fcfs")
    for request in [*of("a", 40), *of("b", 3)]:
        loop.submit(request)
    for index in range(40):
        loop.scheduler.abort(f"a{index}")
    again = dataclasses.replace(make_request("x", id="again", max_tokens=1), caller="a")
    loop.submit(again)
    loop.run()
    order = [row.request.id for plan in loop.runner.plans for row in plan.rows]
    assert order == ["b0", "again", "b1", "b2"]


def test_priority_puts_larger_first_and_equals_in_order() -> None:
    requests = [make_request("x", id=f"q{index}", max_tokens=1, priority=index // 2) for index in range(6)]
    assert served(one_at_a_time("priority"), requests) == ["q4", "q5", "q2", "q3", "q0", "q1"]


def test_lof_puts_the_longest_output_first() -> None:
    requests = [make_request("x", id=f"q{index}", max_tokens=count) for index, count in enumerate((3, 9, 6))]
    assert served(one_at_a_time("lof"), requests) == ["q1", "q2", "q0"]


def test_random_is_shuffled_and_reproducible() -> None:
    def order(seed: int) -> list[str]:
        loop = LoopBuilder(max_requests=1).queue(policy="random", seed=seed).loop()
        return served(loop, [make_request("x", id=f"q{index}", max_tokens=1) for index in range(8)])

    assert order(1) == order(1) != order(2)


def test_lpm_puts_the_longest_cached_prefix_first() -> None:
    loop = one_at_a_time("lpm")
    served(loop, [make_request(text(1, 2, 3), max_tokens=1)])
    requests = [
        make_request(text(9), id="miss", max_tokens=1),
        make_request(text(1, 8), id="one", max_tokens=1),
        make_request(text(1, 2, 3, tail=5), id="three", max_tokens=1),
        make_request(text(1, 2, 7), id="two", max_tokens=1),
    ]
    assert served(loop, requests) == ["three", "two", "one", "miss"]


def test_dfs_weight_serves_the_branch_with_most_waiting_requests_together() -> None:
    loop = LoopBuilder(page_size=PAGE, max_requests=8, max_prefill_rows=8).queue(policy="dfs-weight").loop()
    served(loop, [make_request(text(1, 2), max_tokens=1), make_request(text(1, 3), max_tokens=1)])
    served(loop, [make_request(text(4, 5), max_tokens=1)])
    requests = [
        make_request(text(4, 5), id="lonely", max_tokens=1),
        make_request(text(1, 2, tail=1), id="a", max_tokens=1),
        make_request(text(1, 3, tail=1), id="b", max_tokens=1),
        make_request(text(1), id="stem", max_tokens=1),
        make_request(text(1, 3, tail=2), id="c", max_tokens=1),
        make_request([7], id="miss", max_tokens=1),
    ]
    # Below page 1 wait four: its branch 3 with two of them first, then branch 2, then who ends at the stem.
    assert served(loop, requests) == ["b", "c", "a", "stem", "lonely", "miss"]


@pytest.mark.parametrize("policy", ["priority", "lof", "lpm", "dfs-weight"])
def test_no_request_is_overtaken_for_ever(policy: str) -> None:
    loop = one_at_a_time(policy, max_overtakes=5)
    loop.submit(make_request(text(1, 2), max_tokens=2, priority=9))
    loop.run()
    loop.submit(make_request([9], id="humble", max_tokens=1, priority=-1))
    for _ in range(12):  # a stream of requests that every policy likes better
        loop.submit(make_request(text(1, 2), max_tokens=2, priority=9))
    loop.run()
    order: list[str] = []
    for plan in loop.runner.plans:
        order += [row.request.id for row in plan.rows if row.request.id not in order]
    assert order.index("humble") == 1 + 5


def test_a_cache_aware_window_moves_on() -> None:
    loop = one_at_a_time("lpm")
    requests = [make_request([5, index % 7], id=f"q{index}", max_tokens=1) for index in range(2 * WINDOW)]
    assert served(loop, requests) == [request.id for request in requests]
