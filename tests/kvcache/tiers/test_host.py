"""Host memory: bounded, least recently used out first, and what is held stays."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from rekindle._src.core.records import StepResult
from rekindle._src.kvcache import CostModel, HostTier, Tiers

PAGE = np.zeros((1, 100), np.uint8)


def filled(*names: str, budget: int = 300) -> HostTier:
    tier = HostTier(budget)
    for name in names:
        tier.put(name.encode(), (PAGE,))
    return tier


def left(tier: HostTier, names: str) -> str:
    return "".join(name for name in names if name.encode() in tier)


def test_the_least_recently_used_leave_first() -> None:
    tier = filled(*"abcde")
    assert tier.touch(b"a")
    assert tier.trim() == 2
    assert left(tier, "abcde") == "ade"
    assert tier.statistics().bytes == 300


def test_nothing_leaves_until_it_is_trimmed() -> None:
    tier = filled(*"abcde")
    assert left(tier, "abcde") == "abcde"


def test_held_payloads_stay_until_as_many_releases() -> None:
    tier = filled(*"ab", budget=0)
    for _ in range(2):
        tier.hold(b"a")
    assert tier.trim() == 1
    tier.release(b"a")
    assert tier.trim() == 0
    tier.release(b"a")
    assert tier.trim() == 1
    assert len(tier) == tier.statistics().bytes == 0


def test_a_payload_that_is_gone_raises() -> None:
    with pytest.raises(KeyError):
        HostTier(100).get(b"a")


def test_putting_twice_counts_once() -> None:
    tier = filled(*"aaa")
    assert tier.statistics().bytes == 100
    assert tier.statistics().stored == 1


def test_threads_lose_nothing() -> None:
    tier = HostTier(1 << 30)

    def put(start: int) -> None:
        for number in range(start, start + 500):
            tier.put(number.to_bytes(4, "little"), (PAGE,))

    threads = [threading.Thread(target=put, args=(start,)) for start in (0, 250, 500)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tier) == 1000
    assert tier.statistics().bytes == 100_000


def test_a_budget_of_nothing_wants_nothing() -> None:
    assert not Tiers(HostTier(0), CostModel(4)).should_offload(b"a")
    assert Tiers(HostTier(1), CostModel(4)).should_offload(b"a")


def step(tokens: int, seconds: float, restored: int = 0) -> StepResult:
    """Only what the cost model looks at."""
    plan = SimpleNamespace(tokens=tokens, prefill_tokens=tokens, decode=(), restore=("move",) * restored)
    return cast(StepResult, SimpleNamespace(plan=plan, device_seconds=seconds))


def test_copying_is_refused_when_it_costs_more_than_computing() -> None:
    costs = CostModel(page_size=10)
    assert costs.worth(5), "what was not measured counts as free"
    costs.observe(step(100, 0.1))  # 1 ms a token, 10 ms a page
    costs.observe(step(100, 9.0, restored=4))  # says nothing about tokens
    costs.record_copy(4, 0.02)  # 5 ms a page
    assert costs.rates.copy_page == pytest.approx(0.005)
    assert costs.compute_seconds(2) == pytest.approx(0.02)
    assert costs.worth(2)
    costs.record_load(1, 0.008)
    assert costs.worth(2, from_disk=1)
    assert not costs.worth(2, from_disk=2)
    costs.record_copy(10, 1.0)
    assert sum(costs.worth(2) for _ in range(32)) == 2, "now and then it is tried all the same"
