"""Closing and collecting: what ends, in which order, and what is left then."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import Any

import anyio
import pytest

from helpers.bounds import Within
from helpers.sessions import engine_of, eventually, fake_front, fake_session, result_of, threads
from rekindle import Session
from rekindle._src.core.records import Status
from rekindle._src.session.opening import Opening
from rekindle.errors import SessionClosed


@pytest.mark.anyio
async def test_closing_is_idempotent_and_leaves_no_thread() -> None:
    before = threads()
    session = fake_session()
    assert threads() > before
    runner: Any = engine_of(session).runner
    await session.generate("x", max_tokens=2)
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(session.aclose)
    await session.aclose()
    session.close()
    assert runner.closed and threads() <= before


@pytest.mark.anyio
async def test_closing_ends_what_runs_with_the_reason(within: Within) -> None:
    session = fake_session(step_seconds=0.01)
    handles = [session.submit(f"{i}", max_tokens=400) for i in range(20)]
    errors: list[BaseException] = []

    async def wait(handle: Any) -> None:
        try:
            await handle
        except SessionClosed as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        for handle in handles:
            group.start_soon(wait, handle)
        async for _ in handles[0]:
            break
        with within(4):  # letting them end would take ten seconds
            await session.aclose()
    assert len(errors) == 20 and "closed" in str(errors[0])
    assert handles[0].text, "what it had produced is gone"
    assert handles[0].status is Status.ABORTED
    engine_of(session).scheduler.check_integrity()


@pytest.mark.anyio
async def test_closing_with_drain_lets_requests_end_and_refuses_new_ones() -> None:
    session = fake_session(step_seconds=0.005)
    handle = session.submit("x", max_tokens=30)
    async with anyio.create_task_group() as group:

        async def close() -> None:
            await session.aclose(drain=30)

        group.start_soon(close)
        await anyio.sleep(0.02)
        with pytest.raises(SessionClosed):
            session.submit("late")
    assert len((await handle).token_ids) == 30


@pytest.mark.anyio
async def test_drain_is_bounded(within: Within) -> None:
    session = fake_session(step_seconds=0.01)
    handle = session.submit("x", max_tokens=400)
    start = time.perf_counter()
    with within(3):
        await session.aclose(drain=0.2)
    assert time.perf_counter() - start > 0.15
    with pytest.raises(SessionClosed):
        await handle


@pytest.mark.anyio
async def test_a_paused_session_closes() -> None:
    session = fake_session()
    async with session.paused():
        handle = session.submit("x", max_tokens=3)
        await session.aclose()
    with pytest.raises(SessionClosed):
        await handle


@pytest.mark.anyio
async def test_closing_goes_on_when_its_caller_is_cancelled() -> None:
    before = threads()
    session = fake_session(step_seconds=0.05)
    handle = session.submit("x", max_tokens=400)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await session.aclose()
    eventually(lambda: threads() <= before)
    assert handle.done


def test_a_hanging_device_does_not_hang_closing(monkeypatch: pytest.MonkeyPatch, within: Within) -> None:
    monkeypatch.setattr("rekindle._src.dispatch.host.CLOSE_SECONDS", 0.2)
    gate = threading.Event()
    session = fake_session(gate=gate)
    handle = session.submit("x", max_tokens=5)
    eventually(lambda: len(engine_of(session).runner.plans) > 0)
    with within(5):
        session.close()
    with pytest.raises(SessionClosed):
        handle.result_sync()
    gate.set()


@pytest.mark.anyio
async def test_async_with_and_with_close() -> None:
    async with Opening(fake_front) as session:
        await session.generate("x", max_tokens=1)
    assert session.closed
    with fake_session() as other:
        other.generate_sync("x", max_tokens=1)
    assert other.closed


def test_a_dropped_session_closes_itself() -> None:
    before = threads()
    session = fake_session()
    session.generate_sync("x", max_tokens=1)
    runner: Any = engine_of(session).runner
    alive = weakref.ref(session)
    del session
    gc.collect()
    assert alive() is None
    eventually(lambda: runner.closed and threads() <= before)


def test_ten_sessions_side_by_side() -> None:
    before = threads()
    sessions = [fake_session() for _ in range(10)]
    calls = [session.submit("same", max_tokens=20) for session in sessions]
    assert len({call.result_sync().token_ids for call in calls}) == 1
    assert len({call.id for call in calls}) == 10
    for session in sessions[::2]:
        session.close()
    assert sessions[1].generate_sync("same", max_tokens=1)
    for session in sessions:
        session.close()
    assert threads() <= before


def test_a_session_that_is_used_after_its_loop_has_ended() -> None:
    async def open_and_leave() -> Session:
        session = await Opening(fake_front)
        await session.generate("x", max_tokens=1)
        return session

    session = asyncio.run(open_and_leave())
    assert asyncio.run(result_of(session.generate("y", max_tokens=1))).text
    session.close()
