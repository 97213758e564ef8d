"""Jobs in threads of their own: a few at a time, within a limit, for callers who may leave."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import anyio
import pytest

from helpers.sessions import eventually
from rekindle._src.dispatch.apart import JobThreads
from rekindle._src.dispatch.threads import run_sync
from rekindle.errors import CheckpointError

pytestmark = pytest.mark.anyio
MINUTES = 600.0


def late(seconds: float) -> CheckpointError:
    return CheckpointError(f"not done within {seconds:g} s")


def until_unwanted(wanted: Callable[[], bool]) -> bool:
    eventually(lambda: not wanted())
    return True


async def test_a_job_that_takes_long_delays_no_other() -> None:
    threads, gate, order = JobThreads(2, MINUTES, "x"), threading.Event(), list[str]()

    async def run(name: str, job: Callable[[Callable[[], bool]], object]) -> None:
        await threads.run(job, late)
        order.append(name)
        gate.set()

    async with anyio.create_task_group() as group:
        group.start_soon(run, "long", lambda wanted: gate.wait())
        group.start_soon(run, "short", lambda wanted: None)
    assert order == ["short", "long"] and threads.busy == 0


async def test_a_place_is_free_before_its_caller_hears_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, leave = JobThreads(1, MINUTES, "x"), JobThreads._leave

    def late_to_leave(self: JobThreads) -> None:
        threading.Event().wait(0.05)
        leave(self)

    monkeypatch.setattr(JobThreads, "_leave", late_to_leave)
    for job in (lambda wanted: 1, lambda wanted: 1 // 0):
        with contextlib.suppress(ZeroDivisionError):
            await threads.run(job, late)
        assert threads.busy == 0


async def test_jobs_beyond_the_most_wait_their_turn() -> None:
    threads, gate, running, most = JobThreads(3, MINUTES, "x"), threading.Event(), list[int](), list[int]()

    def job(wanted: Callable[[], bool]) -> None:
        running.append(1)
        most.append(len(running))
        gate.wait()
        running.pop()

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(threads.run, job, late)
        await anyio.to_thread.run_sync(eventually, lambda: len(running) == 3)
        assert threads.busy == 3
        gate.set()
    assert len(most) == 8 and max(most) == 3 and threads.busy == 0


async def test_a_job_learns_that_its_caller_has_left() -> None:
    threads, ended = JobThreads(1, MINUTES, "x"), threading.Event()

    def job(wanted: Callable[[], bool]) -> None:
        until_unwanted(wanted)
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(threads.run, job, late)
        await anyio.to_thread.run_sync(eventually, lambda: threads.busy == 1)
        group.start_soon(threads.run, pytest.fail, late)  # one that waits for its turn leaves without it
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    eventually(ended.is_set)
    assert await threads.run(lambda wanted: wanted(), late)


async def test_a_job_that_is_not_done_within_its_limit_is_given_up() -> None:
    """A disk that hangs keeps its thread, and jobs that find none are told so, too."""
    threads, gate = JobThreads(1, 0.05, "x"), threading.Event()
    asked = list[Callable[[], bool]]()
    with pytest.raises(CheckpointError, match=r"not done within 0\.05 s"):
        await threads.run(lambda wanted: (asked.append(wanted), gate.wait()), late)
    assert not asked[0]() and threads.busy == 1
    with pytest.raises(CheckpointError, match=r"not done within 0\.05 s"):
        await threads.run(pytest.fail, late)
    gate.set()
    eventually(lambda: threads.busy == 0)


async def test_its_error_is_raised_where_it_is_waited_for() -> None:
    threads = JobThreads(1, MINUTES, "x")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda wanted: 1 // 0, late)
    with pytest.raises(ZeroDivisionError):
        run_sync(threads.run(lambda wanted: 1 // 0, late))


async def test_a_system_without_threads_loses_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = JobThreads(1, MINUTES, "x")
    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "x":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError):
            await threads.run(lambda wanted: 1, late)
    assert await threads.run(lambda wanted: 1, late) == 1
