"""The end of a session: closing, crashing, collecting, forking, leaving the interpreter; and what is left then."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import anyio
import pytest

from rekindle import Session
from rekindle.errors import OutOfMemory, RequestFailed, SessionClosed, SessionForked, StepFailed
from rekindle.opening import Opening
from rekindle.records import Status
from rekindle.session import real_detokenizer
from rekindle.tasks.messages import Engine
from sessions import CONFIG, byte_tokenizer, eventually, fake_session, opened, parts, threads

ROOT = Path(__file__).parents[2]


def engine(**options: Any) -> Engine:
    scheduler, runner = parts(CONFIG, **options)
    tokenizer = byte_tokenizer()
    return Engine(scheduler, runner, tokenizer, real_detokenizer(tokenizer), CONFIG, 257, model="fake")


@pytest.mark.anyio
async def test_closing_is_idempotent_and_leaves_no_thread() -> None:
    before = threads()
    session = fake_session()
    assert threads() > before
    runner: Any = session._engine.runner
    await session.generate("x", max_tokens=2)
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(session.aclose)
    await session.aclose()
    session.close()
    assert runner.closed and threads() <= before


@pytest.mark.anyio
async def test_closing_ends_what_runs_with_the_reason() -> None:
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
        start = time.perf_counter()
        await session.aclose()
        assert time.perf_counter() - start < 4  # letting them end would take ten seconds
    assert len(errors) == 20 and "closed" in str(errors[0])
    assert handles[0].text, "what it had produced is gone"
    assert handles[0].status is Status.ABORTED
    session._engine.scheduler.check_integrity()


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
async def test_drain_is_bounded() -> None:
    session = fake_session(step_seconds=0.01)
    handle = session.submit("x", max_tokens=400)
    start = time.perf_counter()
    await session.aclose(drain=0.2)
    assert 0.15 < time.perf_counter() - start < 3
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


def test_a_hanging_device_does_not_hang_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.tasks.host.CLOSE_SECONDS", 0.2)
    gate = threading.Event()
    session = fake_session(gate=gate)
    handle = session.submit("x", max_tokens=5)
    eventually(lambda: len(session._engine.runner.plans) > 0)  # type: ignore[attr-defined]
    start = time.perf_counter()
    session.close()
    assert time.perf_counter() - start < 5
    with pytest.raises(SessionClosed):
        handle.result_sync()
    gate.set()


@pytest.mark.anyio
async def test_async_with_and_with_close() -> None:
    async with Opening(engine) as session:
        await session.generate("x", max_tokens=1)
    assert session.closed
    with fake_session() as other:
        other.generate_sync("x", max_tokens=1)
    assert other.closed


@pytest.mark.anyio
async def test_opening_is_awaited_once_and_reused() -> None:
    opening = Opening(engine)
    session = await opening
    assert await opening is session
    await session.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("error", [OutOfMemory("asked for 3 GiB, 1 GiB is free"), ZeroDivisionError("a defect")])
async def test_errors_while_opening_reach_the_caller_and_leave_nothing(error: Exception) -> None:
    before = threads()

    def build() -> Engine:
        raise error

    with pytest.raises(type(error), match=str(error)):
        await Opening(build)
    eventually(lambda: threads() <= before)


@pytest.mark.anyio
async def test_interrupting_open_returns_at_once_and_frees_what_was_built() -> None:
    before = threads()
    built: list[Engine] = []
    go_on = threading.Event()

    def build() -> Engine:
        assert go_on.wait(60)
        built.append(engine())
        return built[0]

    with anyio.move_on_after(0.05) as scope:
        await Opening(build)
    assert scope.cancelled_caught and not built, "it waited for the build"
    go_on.set()
    eventually(lambda: bool(built) and built[0].runner.closed)  # type: ignore[attr-defined]
    eventually(lambda: threads() <= before)


@pytest.mark.anyio
async def test_opening_does_not_block_the_loop() -> None:
    ticked = threading.Event()

    def build() -> Engine:
        assert ticked.wait(60), "the loop stood still"
        return engine()

    async def tick() -> None:
        for _ in range(10):
            await anyio.sleep(0.001)
        ticked.set()

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        session = await Opening(build)
    await session.aclose()


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

        session._engine.scheduler.commit = broken  # type: ignore[method-assign]
    assert len(caught) == 20
    assert all(isinstance(error.__cause__, ZeroDivisionError) for error in caught)
    assert "crashed" in str(caught[0])
    with pytest.raises(SessionClosed, match="crashed") as later:
        session.submit("x")
    assert isinstance(later.value.__cause__, ZeroDivisionError)
    await session.aclose()
    eventually(lambda: threads() <= before)
    async with Opening(engine) as again:
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

    tokenizer = byte_tokenizer()
    made = Engine(scheduler, runner, tokenizer, real_detokenizer(tokenizer), CONFIG, 257, recover=recover)
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

    made = engine(fail=lambda plan: ValueError("broke"))._replace(recover=recover)
    session = await Opening(lambda: made)
    with pytest.raises(StepFailed):
        await session.generate("x")
    eventually(lambda: session.closed)
    with pytest.raises(SessionClosed, match="no pages"):
        session.submit("x")
    await session.aclose()


def test_a_dropped_session_closes_itself() -> None:
    before = threads()
    session = fake_session()
    session.generate_sync("x", max_tokens=1)
    runner: Any = session._engine.runner
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_is_told() -> None:
    with opened() as session, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # os.fork() in a process with threads, which is the point
        handle = session.submit("x", max_tokens=3)
        handle.result_sync()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for use in (lambda: session.generate("x"), session.stats, lambda: session.submit("x")):
                    try:
                        use()
                    except SessionForked:
                        code = 0
                    else:
                        code = 2
                        break
                session.close()
                handle.cancel()
            finally:
                os._exit(code)
        deadline = time.monotonic() + 20
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended[0] != pid:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("the child hangs")
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        assert session.generate_sync("x", max_tokens=1).text, "the parent's session was harmed"


def run_script(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / name) for name in ("toolkit", "kernels", "tests"))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "ending",
    ["", "raise SystemExit(0)", "del session", "os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"],
    ids=["falls off", "exits", "drops", "interrupted"],
)
def test_leaving_the_interpreter_with_work_in_flight(ending: str) -> None:
    done = run_script(
        f"""
        import os, signal, sys, time
        from sessions import fake_session
        session = fake_session(step_seconds=0.05)
        handles = [session.submit("x", max_tokens=400) for _ in range(4)]
        time.sleep(0.2)
        import atexit
        start = time.perf_counter()
        atexit.register(lambda: print(f"{{time.perf_counter() - start:.2f}}"))
        {ending}
        """
    )
    assert done.returncode in (0, -2, 130, 1), done.stderr
    assert "Fatal" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    if "SIGINT" not in ending:
        assert done.stderr == ""


def test_exit_is_bounded_when_the_device_hangs() -> None:
    start = time.perf_counter()
    done = run_script(
        """
        import threading, time
        from sessions import fake_session
        session = fake_session(gate=threading.Event())
        handle = session.submit("x", max_tokens=400)
        time.sleep(0.2)
        print(time.perf_counter())
        import atexit
        atexit._run_exitfuncs()
        print(time.perf_counter())
        """
    )
    first, second = map(float, done.stdout.split())
    assert second - first < 3.0
    assert time.perf_counter() - start < 60


def test_contexts_are_captured_and_entered_again() -> None:
    jax = pytest.importorskip("jax")
    seen: list[Any] = []

    def build() -> Engine:
        seen.append((jax.config.jax_default_matmul_precision, jax.config.jax_default_device))
        return engine()

    device = jax.devices()[0]
    with jax.default_matmul_precision("highest"), jax.default_device(device):
        opening = Opening(build)
    session = opening.result_sync()
    assert seen == [("highest", device)]
    assert jax.config.jax_default_matmul_precision is None
    session.close()


def test_a_mesh_is_captured_too() -> None:
    jax = pytest.importorskip("jax")
    seen: list[Any] = []

    def build() -> Engine:
        seen.append(jax.sharding.get_mesh())
        return engine()

    mesh = jax.make_mesh((1,), ("x",))
    with jax.set_mesh(mesh):
        opening = Opening(build)
    opening.result_sync().close()
    assert seen == [mesh]


def test_a_session_that_is_used_after_its_loop_has_ended() -> None:
    async def open_and_leave() -> Session:
        session = await Opening(engine)
        await session.generate("x", max_tokens=1)
        return session

    session = asyncio.run(open_and_leave())
    assert asyncio.run(session.generate("y", max_tokens=1)._result()).text
    session.close()
