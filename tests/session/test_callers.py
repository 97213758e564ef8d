"""Who may call: tasks, task groups and nurseries, several loops at once, and code without any loop."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import types
from typing import Any

import anyio
import pytest
import trio

from helpers.sessions import expected
from rekindle import Sampling, Session
from rekindle._src.dispatch.threads import AsyncioWakeup

anyio_test = pytest.mark.anyio


@anyio_test
async def test_calls_can_be_started_by_task_groups(session: Session) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(session.generate, "hello", Sampling(max_tokens=2))


def test_calls_can_be_gathered_and_made_tasks(session: Session) -> None:
    async def main() -> None:
        task = asyncio.create_task(session.generate("x", max_tokens=2))
        done = await asyncio.gather(*(session.generate(f"{i}", max_tokens=5) for i in range(50)))
        assert len(done) == 50 and len((await task).token_ids) == 2
        assert (await asyncio.wait_for(session.generate("x", max_tokens=1), 10)).text

    asyncio.run(main())


def test_a_thread_that_imports_trio_disturbs_no_session(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        for begun in (types.ModuleType("trio"), types.SimpleNamespace(lowlevel=types.ModuleType("trio.lowlevel"))):
            monkeypatch.setitem(sys.modules, "trio", begun)  # as other threads see it meanwhile
            assert (await session.generate("x", max_tokens=3)).text

    asyncio.run(main())


def test_calls_can_be_started_by_a_nursery(session: Session) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.generate, "hello", Sampling(max_tokens=2))

    trio.run(main)


@anyio_test
async def test_a_call_that_is_never_awaited_does_nothing_and_says_nothing(session: Session) -> None:
    call = session.generate("hello")
    stream = session.stream("hello")
    del call, stream
    gc.collect()
    assert session.stats().live == 0


def test_callers_on_several_loops_and_none_at_once(session: Session) -> None:
    want = expected("hello", max_tokens=40)
    results: list[list[int]] = []

    async def on_loop() -> None:
        for _ in range(5):
            results.append(list((await session.generate("hello", max_tokens=40)).token_ids))
            results.append([t async for delta in session.stream("hello", max_tokens=40) for t in delta.token_ids])

    def on_none() -> None:
        for _ in range(5):
            results.append(list(session.generate_sync("hello", max_tokens=40).token_ids))
            results.append([t for delta in session.stream_sync("hello", max_tokens=40) for t in delta.token_ids])

    uvloop = pytest.importorskip("uvloop")
    runners = [lambda: asyncio.run(on_loop()), lambda: trio.run(on_loop), lambda: uvloop.run(on_loop()), on_none]
    threads = [threading.Thread(target=runner) for runner in runners * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [want] * 80


@pytest.mark.parametrize(("backend", "options"), [("asyncio", {"use_uvloop": True}), ("trio", None)])
def test_the_host_runs_on_other_loops_too(backend: str, options: Any) -> None:
    from helpers.sessions import fake_front
    from rekindle._src.capabilities import capabilities_of
    from rekindle._src.dispatch.host import Host, wait

    host = Host(fake_front, capabilities_of, backend=backend, backend_options=options)
    host.start()
    with Session.attached(host, wait(host.opened)) as session:
        assert list(session.generate_sync("hello", max_tokens=20).token_ids) == expected("hello", max_tokens=20)


def test_the_asyncio_loop_turns_while_somebody_waits(slow: Session) -> None:
    """ipykernel's interrupt does not wake an idle loop."""

    async def main() -> int:
        turns = 0
        loop = asyncio.get_running_loop()
        select = loop._selector.select  # type: ignore[attr-defined]

        def counted(timeout: float | None) -> Any:
            nonlocal turns
            turns += 1
            assert timeout is None or timeout <= 0.11
            assert timeout is not None, "the loop sleeps without end"
            return select(timeout)

        loop._selector.select = counted  # type: ignore[attr-defined]
        try:
            await slow.generate("hello", max_tokens=30)
        finally:
            loop._selector.select = select  # type: ignore[attr-defined]
        return turns

    assert asyncio.run(main()) >= 2


def test_bells_are_of_the_loop_that_waits(session: Session) -> None:
    async def main() -> None:
        from rekindle._src.dispatch.threads import new_wakeup

        assert isinstance(new_wakeup(), AsyncioWakeup)

    asyncio.run(main())
