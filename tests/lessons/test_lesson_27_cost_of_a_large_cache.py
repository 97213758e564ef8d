"""What a step costs the host does not depend on how much is cached; the test counts calls, not time.

Upstream: https://github.com/sgl-project/sglang/pull/14339
Each eviction walked the whole radix tree.
"""

from __future__ import annotations

import dataclasses

import pytest

from helpers.counting import Calls, listening
from helpers.sessions import CONFIG, fake_session
from helpers.thorough import by_default
from rekindle import Session

FEW, MANY = 40, 4096  # pages
ROOMY = dataclasses.replace(CONFIG, max_queue=4096)
HOT = "a prompt that is asked for again and again, as long as five pages"


def fill(session: Session, pages: int) -> None:
    """Until so many pages are cached or the first one had to leave: some twenty for each of many prompts."""
    count = 0
    while session.stats().pages_cached < pages and not session.stats().cache.evicted_pages:
        session.generate_sync(
            [f"{i % 7} begins {i:06}{' and goes on a while' * 8}" for i in range(count, count + 8)], max_tokens=1
        )
        count += 8


def hits(session: Session, calls: Calls) -> float:
    """Calls for each step of requests that find nearly all of their prompt."""
    return per_step(session, calls, [HOT] * 4)


def misses(session: Session, calls: Calls) -> float:
    """The same for new prompts, which a full pool makes room for by evicting."""
    return per_step(session, calls, [f"{i} is a prompt that nobody has seen before, {i * 7919}" for i in range(4)])


def per_step(session: Session, calls: Calls, prompts: list[str]) -> float:
    best = float("inf")
    for turn in range(5):  # threads wake each other more or less often, hence the least of several
        steps = session.stats().steps
        with calls.counted() as counted:
            for text in prompts:
                session.generate_sync(text + str(turn), max_tokens=12)
        best = min(best, counted[0] / (session.stats().steps - steps))
    return best


@pytest.mark.parametrize("work", by_default([hits, misses]))
def test_lesson_27_a_step_costs_the_same_beside_forty_and_beside_four_thousand_cached_pages(work) -> None:  # type: ignore[no-untyped-def]
    costs = {}
    for pages in (FEW, MANY):
        with listening() as calls, fake_session(ROOMY, num_pages=pages + 1) as session:
            session.generate_sync(HOT, max_tokens=1)
            fill(session, pages // 2 if work is hits else pages + 1)
            evicted = session.stats().cache.evicted_pages
            costs[pages] = work(session, calls)
            if work is misses:
                assert session.stats().cache.evicted_pages > evicted, "nothing had to leave"
            session.check_integrity()
    assert costs[MANY] < 1.15 * costs[FEW], f"calls per step by cached pages: {costs}"
