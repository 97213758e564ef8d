"""Forks, single steps of a paused session, statistics, explanations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import anyio
import pytest

from helpers.sessions import opened
from helpers.thorough import anyio_backend  # noqa: F401  the fixture
from rekindle import Explanation, PhaseKind, Session, Status
from rekindle.errors import InvalidRequest, PromptTooLong, RekindleError, RequestAborted, StepFailed

anyio_test = pytest.mark.anyio


@anyio_test
async def test_fork_repeats_or_departs(session: Session) -> None:
    done = await session.generate("hello", temperature=1.0, seed=3, max_tokens=20)
    same = await session.fork(done, at=8)
    assert same.token_ids == done.token_ids[8:]
    other = await session.fork(done, at=8, seed=4)
    assert other.prompt_token_ids == (*done.prompt_token_ids, *done.token_ids[:8])
    assert len(other.token_ids) == 12 and other.token_ids != same.token_ids
    edited = await session.fork(done, at=8, edit="!", max_tokens=3)
    assert bytes(edited.prompt_token_ids) == b"hello" + bytes(done.token_ids[:8]) + b"!"
    with pytest.raises(InvalidRequest, match="outside of the 20 tokens"):
        session.fork(done, at=21)


@anyio_test
async def test_fork_of_a_running_request(slow: Session) -> None:
    handle = slow.submit("hello", max_tokens=40)
    async for _ in handle:
        if len(handle.token_ids) >= 5:
            break
    branch = slow.fork(handle, at=5)
    assert (await branch).token_ids == (await handle).token_ids[5:]


@anyio_test
async def test_stepping_a_paused_session(session: Session) -> None:
    running = session.submit("earlier", max_tokens=300)
    async with session.paused():
        assert session.stats().paused
        before = running.token_ids
        await anyio.sleep(0.05)
        assert running.token_ids == before, "it ran while paused"
        handle = session.submit("hello", max_tokens=2)
        report = await session.step()
        while handle.id not in {row.request_id for row in report.rows}:
            report = await session.step()
        mine = next(row for row in report.rows if row.request_id == handle.id)
        assert (mine.kind, mine.start, mine.stop) == ("prefill", 0, 5)
        assert handle.token_ids == (mine.token_id,), "the delta is there when step() returns"
        assert f"prefill {handle.id}" in str(report) and "positions 0–4 on pages" in str(report)
        report = await session.step()
        assert "ended by length" in str(report)
        running.cancel()
    assert not session.stats().paused
    assert len((await handle).token_ids) == 2
    with session.paused():
        assert session.step_sync() is None, "there was nothing to do"
    with pytest.raises(Exception, match=r"session\.paused"):
        await session.step()


@anyio_test
async def test_who_has_paused_the_session_is_told_not_to_wait(session: Session) -> None:
    async with session.paused():
        handle = session.submit("hello", max_tokens=2)
        for call in (handle, session.generate("hello", max_tokens=2), session.generate(["a", "b"], max_tokens=2)):
            with pytest.raises(RekindleError, match=r"submit\(\) and then step\(\)"):
                await call
        with pytest.raises(RekindleError, match="no step would ever run"):
            async for _ in session.stream("hello", max_tokens=2):
                pass
        while not handle.done:
            await session.step()
        assert len((await handle).token_ids) == 2, "what has ended can be had"
        async with anyio.create_task_group() as group:  # others may wait: there is somebody to step

            async def wait() -> None:
                await session.generate("hello", max_tokens=2)
                group.cancel_scope.cancel()

            group.start_soon(wait)
            while True:
                await session.step()
                await anyio.sleep(0.001)
    with session.paused(), pytest.raises(RekindleError, match="no step would ever run"):
        session.generate_sync("hello", max_tokens=2)
    assert len((await session.generate("hello", max_tokens=2)).token_ids) == 2


@anyio_test
async def test_a_request_that_nobody_knows_is_not_explained(session: Session) -> None:
    for request in (session.generate("hello"), "r0-of-another-session"):
        with pytest.raises(InvalidRequest, match="not submitted yet"):
            session.explain(request)


@anyio_test
async def test_a_failing_single_step_raises_its_cause() -> None:
    with opened(fail=lambda plan: ValueError("broken") if plan.step == 0 else None) as session:
        async with session.paused():
            handle = session.submit("hello", max_tokens=3)
            with pytest.raises(ValueError, match="broken"):
                await session.step()
        with pytest.raises(Exception, match="broken"):
            await handle


@anyio_test
async def test_stats_and_explain(slow: Session) -> None:
    handle = slow.submit("hello", max_tokens=50)
    async for _ in handle:
        break
    stats = slow.stats()
    assert (stats.live, stats.model, stats.running) == (1, "fake", 1)
    assert stats.steps >= 1 and "running" in str(stats) and stats.as_dict()["live"] == 1
    with pytest.raises(AttributeError):
        _ = stats.nonsense
    assert str(slow.explain(handle)) and str(slow.explain(handle.id))
    handle.cancel()


@anyio_test
async def test_the_timeline_of_every_kind_of_end(slow: Session, at_most: Callable[[float], float]) -> None:
    def told(request: object) -> Explanation:
        found = slow.explain(request)  # type: ignore[arg-type]
        assert "\n" not in repr(found) and len(repr(found)) <= 200
        assert [line.strip() for line in str(found).splitlines()[1:]] == [str(phase) for phase in found.timeline]
        end = 0.0
        for phase in found.timeline:
            assert phase.start == pytest.approx(end, abs=1e-6)
            end = phase.start + phase.seconds
        assert found.seconds == pytest.approx(end)
        return found

    running = slow.submit("hello", max_tokens=200)
    async for _ in running:
        break
    assert told(running).status is Status.DECODE and told(running).timeline[-1].kind is PhaseKind.DECODE
    running.cancel()
    with pytest.raises(RequestAborted):
        await running
    cancelled = told(running)
    assert cancelled.status is Status.ABORTED and PhaseKind.DECODE in {phase.kind for phase in cancelled.timeline}
    await anyio.sleep(0.05)
    assert told(running).seconds == cancelled.seconds, "its time went on after its end"

    handle = slow.submit("hello", max_tokens=4)
    done = await handle
    for request in (handle, done, done.id):
        finished = told(request)
        assert finished.status is Status.FINISHED
        assert abs(finished.seconds - done.timings.total) < at_most(0.25)
        assert {PhaseKind.PREFILL, PhaseKind.DECODE} <= {phase.kind for phase in finished.timeline}
    forgotten = told(dataclasses.replace(done, id="r-long-ago"))
    assert "over for long" in forgotten.text and forgotten.seconds == pytest.approx(done.timings.total)

    too_long = slow.submit("hello " * 1000)
    with pytest.raises(PromptTooLong):
        await too_long
    assert told(too_long).status is Status.FAILED and "before it was queued" in told(too_long).text
    for wrong in ([done], 5, None):
        with pytest.raises(InvalidRequest, match="not a handle, a completion, the answer to a row, or an id"):
            slow.explain(wrong)  # type: ignore[arg-type]


@anyio_test
async def test_a_request_whose_step_raised_has_its_timeline_too() -> None:
    with opened(fail=lambda plan: ValueError("broken") if plan.step == 2 else None) as session:
        handle = session.submit("hello", max_tokens=30)
        with pytest.raises(StepFailed):
            await handle
        told = session.explain(handle)
    assert told.status is Status.FAILED and "broken" in told.text and told.timeline[-1].kind is PhaseKind.DECODE
