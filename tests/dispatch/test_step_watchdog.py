"""Log lines come every so many steps and say what happened; a step is reported with what it runs while it hangs."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

import anyio
import pytest

from helpers.fakes import make_request
from helpers.sessions import CONFIG, engine_of, eventually, opened, parts
from rekindle._src.core.records import StepPlan, StepResult
from rekindle._src.dispatch.engine import StepWatchdog


def test_a_line_every_few_steps_counts_what_they_did(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rekindle.steps"), opened(dataclasses.replace(CONFIG, log_every=2)) as session:
        session.generate_sync("count me", max_tokens=9, ignore_eos=True)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) >= 4
    assert lines[0].startswith("steps=2 new_sequences=1 new_tokens=2 ")
    assert all(
        word in lines[0] for word in ("pages_used=", "running=1", "queued=0", "tokens_per_s=", "idle=", "compilations=")
    )
    assert lines[1].startswith("steps=4 new_sequences=0 new_tokens=2 ")


def test_it_is_quiet_by_default(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rekindle.steps"), opened() as session:
        session.generate_sync("hush", max_tokens=9)
    assert not caplog.records


def test_a_slow_step_is_reported_with_what_it_ran(caplog: pytest.LogCaptureFixture) -> None:
    config = dataclasses.replace(CONFIG, step_timeout=0.0)
    with caplog.at_level(logging.WARNING, "rekindle.steps"), opened(config, step_seconds=0.01) as session:
        handle = session.submit("slow", max_tokens=2)
        handle.result_sync()
    assert caplog.records
    assert "limit 0.0" in caplog.text
    assert handle.request_ids[0] in caplog.text


HASTY = dataclasses.replace(CONFIG, step_timeout=0.05)


def test_a_step_that_hangs_is_reported_while_it_hangs(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    with caplog.at_level(logging.WARNING, "rekindle.steps"), opened(HASTY, gate=release) as session:
        assert session.stats().stalled == ""
        handles = [session.submit(text, max_tokens=3, ignore_eos=True) for text in ("this hangs", "and this with it")]
        try:
            eventually(lambda: session.stats().stalled != "")
            stats = session.stats()
            eventually(lambda: len(caplog.records) == 1)
        finally:
            release.set()
        said = caplog.records[0].getMessage()
        for text in (said, stats.stalled):
            assert "has been on the device for" in text
            assert "program fake" in text and "prefill tokens" in text
            assert handles[0].request_ids[0] in text
        assert stats.slow_steps == 1
        assert [len(handle.result_sync().token_ids) for handle in handles] == [3, 3], "it went on afterwards"
        assert session.stats().stalled == ""


def test_a_dispatch_that_hangs_is_reported_too(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    with (
        caplog.at_level(logging.WARNING, "rekindle.steps"),
        opened(HASTY, fail=lambda plan: release.wait(20) and None) as session,
    ):
        handle = session.submit("this compiles", max_tokens=1)
        try:
            eventually(lambda: "in preparation" in session.stats().stalled)
            eventually(lambda: "compiling included" in caplog.text)
        finally:
            release.set()
        handle.result_sync()


def test_a_step_within_its_limit_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rekindle.steps"), opened(step_seconds=0.01) as session:
        session.generate_sync("quick", max_tokens=5, ignore_eos=True)
        assert (session.stats().slow_steps, session.stats().stalled) == (0, "")
    assert not caplog.records


@pytest.mark.anyio
async def test_the_watch_sees_every_hanging_step_once_and_sleeps_between(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, runner = parts(HASTY)
    for text in ("abc", "def"):
        scheduler.submit(make_request(text, id=text, max_tokens=3))
    watchdog = StepWatchdog(scheduler, runner, HASTY)
    plans = [plan for plan in (scheduler.plan(), scheduler.plan()) if plan is not None]
    assert len(plans) == 2

    async def until(condition: Callable[[], bool]) -> None:
        with anyio.fail_after(60):
            while not condition():  # noqa: ASYNC110
                await anyio.sleep(0.005)

    with caplog.at_level(logging.WARNING, "rekindle.steps"):
        async with anyio.create_task_group() as group:
            group.start_soon(watchdog.run)
            for count, plan in enumerate(plans, start=1):
                watchdog.wake()
                watchdog.enter(plan, "on the device")
                await until(lambda count=count: len(caplog.records) == count)  # type: ignore[misc]
                await anyio.sleep(3 * HASTY.step_timeout)
                assert len(caplog.records) == count, "said twice"
                assert watchdog.figures().slow_steps == count
                watchdog.leave()
                await until(lambda: watchdog._asleep is not None)
                assert watchdog.figures().stalled == ""
            group.cancel_scope.cancel()
    assert [f"step {plan.step} has been on the device" in record.getMessage() for plan, record in zip(
        plans, caplog.records, strict=True)] == [True, True]  # fmt: skip


def test_idle_time_counts_only_while_somebody_wants_a_step() -> None:
    scheduler, runner = parts()
    watchdog = StepWatchdog(scheduler, runner, CONFIG)

    def step(idle: float) -> None:
        watchdog(StepResult(StepPlan(0, (), ()), (), device_seconds=3.0, idle_seconds=idle))

    step(100.0)  # nobody had asked for anything
    step(1.0)
    watchdog.rest()
    step(100.0)
    step(2.0)
    assert watchdog.figures().idle_seconds == 3.0
    assert watchdog.figures().idle_share == 3.0 / (3.0 + 4 * 3.0)


def test_requests_that_follow_each_other_leave_no_idle_time_behind() -> None:
    with opened() as session:
        runner = engine_of(session).runner
        fetch, last = runner.fetch, [time.perf_counter()]

        def noted(flight: object) -> StepResult:
            now, before = time.perf_counter(), last[0]
            last[0] = now
            return dataclasses.replace(fetch(flight), idle_seconds=now - before, device_seconds=0.0)

        runner.fetch = noted  # type: ignore[method-assign]
        for _ in range(2):
            session.generate_sync("one step", max_tokens=1)
            time.sleep(0.05)
        assert session.stats().idle_seconds == 0.0, "time without requests was counted"
