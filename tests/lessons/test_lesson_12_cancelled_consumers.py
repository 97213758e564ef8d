"""When a consumer goes away, in whatever way, its slot and pages are given back within a step.

Upstream: https://github.com/vllm-project/vllm/issues/9428
A client that disconnected did not abort its request.
"""

from __future__ import annotations

import asyncio
import gc

import anyio
import pytest

from helpers.sessions import CONFIG, engine_of, eventually, opened, wait_until_idle
from rekindle import Session
from rekindle._src.core.records import StepPlan


async def by_timeout(session: Session) -> None:
    with anyio.move_on_after(0.05):
        await session.generate("x" * 30, max_tokens=400)


async def by_scope(session: Session) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(session.generate, "x" * 30)
        await anyio.sleep(0.05)
        group.cancel_scope.cancel()


async def by_break(session: Session) -> None:
    async for _ in session.stream("x" * 30, max_tokens=400):
        break


async def by_exception(session: Session) -> None:
    async def fails() -> None:
        async for _ in session.stream("x" * 30, max_tokens=400):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fails()


async def by_collection(session: Session) -> None:
    handle = session.submit("x" * 30, max_tokens=400)
    await anyio.sleep(0.05)
    del handle
    gc.collect()


async def by_hand(session: Session) -> None:
    handle = session.submit("x" * 30, max_tokens=400)
    await anyio.sleep(0.05)
    handle.cancel()


WAYS = (by_timeout, by_scope, by_break, by_exception, by_collection, by_hand)


@pytest.mark.anyio
@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
async def test_lesson_12_a_consumer_that_leaves_frees_everything_within_a_step(leave) -> None:  # type: ignore[no-untyped-def]
    leaving: list[int] = []

    def look(plan: StepPlan) -> None:
        leaving.append(engine_of(session).scheduler.statistics().leaving)

    with opened(step_seconds=0.01, fail=look) as session:
        bystander = session.submit("other", max_tokens=50)
        await leave(session)
        scheduler = engine_of(session).scheduler
        eventually(lambda: session.stats().live <= 1)
        assert len((await bystander).token_ids) == 50
        wait_until_idle(session)
        assert sum(map(bool, leaving)) <= 3, "steps at which it had not left"
        statistics = scheduler.statistics()
        assert statistics.pages_held == 0 and statistics.running == 0


def test_lesson_12_a_cancelled_asyncio_task_aborts_its_request() -> None:
    async def main(session: Session) -> None:
        tasks = [asyncio.create_task(session.generate(f"{i}", max_tokens=400)) for i in range(CONFIG.max_requests)]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True)
        )

    with opened(step_seconds=0.005) as session:
        asyncio.run(main(session))


def test_lesson_12_a_loop_that_is_torn_down_aborts_what_it_awaited() -> None:
    async def main(session: Session) -> None:
        asyncio.get_running_loop().create_task(session.generate("x", max_tokens=400))
        await asyncio.sleep(0.05)

    with opened(step_seconds=0.01) as session:
        asyncio.run(main(session))
        wait_until_idle(session)
