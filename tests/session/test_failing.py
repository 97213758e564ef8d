"""Steps that fail, pages that are lost with them, and crashes: who is told what, and what goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from helpers.sessions import (
    CONFIG,
    engine_of,
    eventually,
    expected,
    fake_front,
    fake_session,
    host_of,
    opened,
    parts,
    threads,
)
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle._src.dispatch.device import Device
from rekindle._src.dispatch.engine import Engine
from rekindle._src.session.opening import Opening
from rekindle.errors import RequestAborted, RequestFailed, SessionClosed, StepFailed


@pytest.mark.anyio
async def test_a_crash_reaches_every_waiter_and_another_session_opens() -> None:
    before = threads()
    session = fake_session(step_seconds=0.005)
    handles = [session.submit(f"{i}", max_tokens=300) for i in range(20)]
    caught: list[BaseException] = []

    async def wait(handle: Any) -> None:
        try:
            await handle
        except BaseException as error:
            caught.append(error)
            if not isinstance(error, SessionClosed):
                raise

    async with anyio.create_task_group() as group:
        for handle in handles:
            group.start_soon(wait, handle)
        await anyio.sleep(0.05)

        def broken(result: Any) -> Any:
            raise ZeroDivisionError("a defect")

        engine_of(session).scheduler.commit = broken
    assert len(caught) == 20
    assert all(isinstance(error.__cause__, ZeroDivisionError) for error in caught)
    assert "crashed" in str(caught[0])
    with pytest.raises(SessionClosed, match="crashed") as later:
        session.submit("x")
    assert isinstance(later.value.__cause__, ZeroDivisionError)
    await session.aclose()
    eventually(lambda: threads() <= before)
    async with Opening(fake_front) as again:
        assert (await again.generate("x", max_tokens=1)).text


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["fail", "fail_fetch"])
async def test_a_failing_step_fails_its_requests_and_nothing_else(where: str) -> None:
    failing = {3}

    def fail(plan: Any) -> Exception | None:
        return ValueError("a step broke") if plan.step in failing else None

    with opened(step_seconds=0.002, **{where: fail}) as session:
        with pytest.raises(StepFailed, match="a step broke") as caught:
            await session.generate("x", max_tokens=50)
        assert isinstance(caught.value.__cause__, ValueError)
        assert isinstance(caught.value, RequestFailed)
        assert len((await session.generate("x", max_tokens=50)).token_ids) == 50


@pytest.mark.anyio
@pytest.mark.parametrize("end", ["cancelled", "finished"])
async def test_a_request_whose_pages_are_miscounted_ends_alone(end: str, caplog: pytest.LogCaptureFixture) -> None:
    scheduler, runner = parts(step_seconds=0.002)
    made = fake_front()._replace(backend=Engine(scheduler, runner, CONFIG))
    session = await Opening(lambda: made)
    broken = session.submit("a prompt that has several pages", max_tokens=40)
    neighbour = session.submit("a neighbour", max_tokens=60)
    async for _ in broken:
        break

    def miscount() -> None:
        (sequence,) = (one for one in scheduler.running_set.running if one.id == broken.request_ids[0])
        scheduler.pool._refs[sequence.pages.ids[0]] -= 1

    host_of(session).ask(miscount)
    if end == "cancelled":
        broken.cancel()
    with pytest.raises(RequestAborted if end == "cancelled" else RequestFailed):
        await broken
    assert (await neighbour).token_ids == tuple(expected("a neighbour", max_tokens=60))
    assert (await session.generate("x", max_tokens=5)).token_ids == tuple(expected("x", max_tokens=5))
    assert "bookkeeping" in caplog.text or "not used again" in caplog.text
    await session.aclose()


class Recovering(Device):
    def __init__(self, recover: Callable[[], bool]) -> None:
        self.recover = recover  # type: ignore[method-assign]


@pytest.mark.anyio
async def test_after_a_failed_step_lost_pages_are_computed_again() -> None:
    failing: set[int] = set()

    def fail(plan: Any) -> Exception | None:
        return ValueError("a step broke") if plan.step in failing else None

    scheduler, runner = parts(CONFIG, fail_fetch=fail, step_seconds=0.002)
    asked: list[int] = []

    def recover() -> bool:
        asked.append(runner.fetched)
        runner.memory[:] = 0xBAD
        return True

    engine = Engine(scheduler, runner, CONFIG, Recovering(recover))
    made = fake_front()._replace(backend=engine)
    session = await Opening(lambda: made)
    long = session.submit("a prompt that has several pages", max_tokens=4)
    await long
    async with session.paused():
        survivor = session.submit("a prompt that has several pages", max_tokens=40)
        for _ in range(3):
            await session.step()
        failing.add(scheduler.statistics().steps)
        survivor_tokens = survivor.token_ids
        with pytest.raises(ValueError, match="a step broke"):
            await session.step()
    # That request was in the failed step; one that comes later must not match the lost pages.
    with pytest.raises(StepFailed):
        await survivor
    assert survivor_tokens
    again = await session.generate("a prompt that has several pages", max_tokens=4)
    assert asked, "nobody looked after the failed step"
    assert again.usage.cached_tokens == 0 and again.token_ids == (await long).token_ids
    await session.aclose()


@pytest.mark.anyio
async def test_a_recovery_that_fails_closes_the_session_with_its_cause() -> None:
    def recover() -> bool:
        raise MemoryError("no pages")

    made = fake_front(device=Recovering(recover), fail=lambda plan: ValueError("broke"))
    session = await Opening(lambda: made)
    with pytest.raises(StepFailed):
        await session.generate("x")
    eventually(lambda: session.closed)
    with pytest.raises(SessionClosed, match="no pages"):
        session.submit("x")
    await session.aclose()
