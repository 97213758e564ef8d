"""A flood of 10,000 submissions holds constant memory, and backpressure reaches the caller.

Upstream: https://github.com/vllm-project/vllm/issues/18826
The waiting queue had no limit and grew until memory ran out.
"""

from __future__ import annotations

import threading
import tracemalloc

import anyio
import pytest

from helpers.sessions import CONFIG, opened
from rekindle import Sampling
from rekindle.errors import QueueFull


def test_lesson_16_a_flood_of_refused_submissions_holds_constant_memory() -> None:
    gate = threading.Event()
    with opened(CONFIG, gate=gate) as session:
        kept = [session.submit("x", max_tokens=1) for _ in range(CONFIG.max_queue + CONFIG.max_requests)]

        def flood() -> int:
            for _ in range(2_500):
                try:
                    session.submit("x" * 1000, max_tokens=1)
                except QueueFull:
                    continue
                pytest.fail("there was a place")
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        flood()
        first = flood()
        flood()
        grown = flood() - first
        tracemalloc.stop()
        gate.set()
        assert grown < 200_000, f"{grown} bytes more after 5,000 further submissions"
        for handle in kept:
            handle.result_sync()


@pytest.mark.anyio
async def test_lesson_16_whoever_waits_for_a_place_is_served_and_the_session_never_holds_more() -> None:
    most = 0
    with opened(CONFIG) as session:

        async def produce(producer: int) -> None:
            nonlocal most
            for i in range(40):
                handle = await session.admit(f"{producer} {i}", max_tokens=1)
                most = max(most, session.stats().live)
                await handle

        async with anyio.create_task_group() as group:
            for producer in range(10):
                group.start_soon(produce, producer)
            group.start_soon(session.generate, [f"list {i}" for i in range(400)], Sampling(max_tokens=1))
        assert most <= CONFIG.max_queue + CONFIG.max_requests
        assert session.stats().submitted == 800
