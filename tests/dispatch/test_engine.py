"""The engine by itself: its loop in one thread, its task while the test plays the device, and the device's turns."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

from helpers.fakes import FakeModel, make_request
from helpers.sessions import fake_engine, parts, rest
from rekindle._src.core.records import FinishReason, Request, StepPlan
from rekindle._src.dispatch import engine as engine_module
from rekindle._src.dispatch.backend import (
    Abort,
    Drain,
    Events,
    Exclusive,
    LoopTurn,
    Pause,
    Resume,
    StepOnce,
    StepOutcome,
    TurnOutcome,
    take,
)
from rekindle._src.dispatch.engine import Engine
from rekindle._src.dispatch.threads import DeviceThread, OneShot
from rekindle.errors import PromptTooLong, RequestFailed

pytestmark = pytest.mark.anyio


def run_calls(batch: Events) -> None:
    for call in batch.then:
        call()


class TestTurn:
    """The whole loop in one thread."""

    @pytest.mark.parametrize("ahead", [True, False])
    def test_turns_give_the_texts_of_a_plain_loop(self, ahead: bool) -> None:
        engine = Engine(*parts(), ahead=ahead)
        requests = [make_request(text, id=text, max_tokens=5) for text in ("abc", "b", "a longer prompt")]
        for request in requests:
            engine.submit(request)
        tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        while (events := engine.turn()) is not None:
            for event in events:
                tokens[event.request_id] += event.token_ids
        assert tokens == {request.id: FakeModel().generate(request) for request in requests}
        assert not engine.scheduler.has_work and engine.turn() is None
        engine.scheduler.check_integrity()

    def test_the_next_step_is_dispatched_before_the_last_one_is_fetched(self) -> None:
        engine = fake_engine()
        order = record_calls(engine.runner)
        engine.submit(make_request("abc", max_tokens=3))
        while engine.turn() is not None:
            pass
        assert order == ["dispatch 0", "dispatch 1", "fetch 0", "dispatch 2", "fetch 1", "fetch 2"]

    @pytest.mark.parametrize("error", [ValueError("a defect"), MemoryError(), RecursionError("too deep")])
    def test_an_exception_in_a_requests_own_work_ends_that_request_only(self, error: Exception) -> None:
        engine = fake_engine()
        submit = engine.scheduler.submit

        def broken(request: Request) -> None:
            if request.id == "victim":
                raise error
            submit(request)

        engine.scheduler.submit = broken  # type: ignore[method-assign]
        for name in ("victim", "other"):
            take(engine, make_request("abc", id=name, max_tokens=2))
        events = [event for batch in iter(engine.turn, None) for event in batch]
        ends = {event.request_id: event for event in events if event.finish_reason is not None}
        assert ends["victim"].finish_reason is FinishReason.FAILED
        assert isinstance(ends["victim"].error, RequestFailed) and ends["victim"].error.__cause__ is error
        assert ends["other"].finish_reason is FinishReason.LENGTH


def record_calls(runner: Any) -> list[str]:
    """The runner's calls from now on, in their order."""
    order: list[str] = []
    dispatch, fetch = runner.dispatch, runner.fetch
    runner.dispatch = lambda plan: (order.append(f"dispatch {plan.step}"), dispatch(plan))[1]
    runner.fetch = lambda flight: (order.append(f"fetch {flight.plan.step}"), fetch(flight))[1]
    return order


def outcome_of(engine: Engine, turn: LoopTurn) -> OneShot[TurnOutcome]:
    """The message that the device's thread answers a turn with."""
    outcome: OneShot[TurnOutcome] = OneShot()
    outcome.run(lambda: engine.advance(turn))
    return outcome


def broken(turn: LoopTurn) -> TurnOutcome:
    raise ZeroDivisionError("advance never raises")


def no_turn(turn: LoopTurn) -> None:
    raise AssertionError(f"{turn} was started")


class TestSchedule:
    """The test plays the device, so it sees every turn."""

    async def start(self, group: Any, **options: Any) -> Any:
        made = fake_engine(**options)
        self.engine = made
        self.inbox, receive = anyio.create_memory_object_stream[Any](100)
        turns, self.turns = anyio.create_memory_object_stream[LoopTurn](1)
        events, self.events = anyio.create_memory_object_stream[Events](100)

        async def schedule() -> None:
            async with turns:
                await made.schedule(receive, turns.send_nowait, events)

        group.start_soon(schedule)
        return made.scheduler

    async def turn(self) -> LoopTurn:
        with anyio.fail_after(60):
            return await self.turns.receive()

    async def answer(self, turn: LoopTurn) -> None:
        await self.inbox.send(outcome_of(self.engine, turn))

    async def delivered(self) -> None:
        """Play the detokenize task for what is there by now."""
        await anyio.wait_all_tasks_blocked()
        while self.events.statistics().current_buffer_used:
            run_calls(self.events.receive_nowait())

    async def test_plans_ahead_of_results_and_ends_after_the_last_one(self) -> None:
        plans: list[StepPlan | None] = []
        async with anyio.create_task_group() as group:
            await self.start(group)
            await self.inbox.send(make_request("abc", id="a", max_tokens=3))
            await self.inbox.send(Drain())
            async for turn in self.turns:
                plans.append(turn.plan)
                await self.answer(turn)
        # Three steps, each dispatched before the one before was read, then one turn that only reads.
        assert [plan.step if plan else None for plan in plans] == [0, 1, 2, None]
        events = [event for batch in await rest(self.events) for event in batch.events]
        assert [event.finish_reason for event in events] == [None, None, FinishReason.LENGTH]
        tokens = [token for event in events for token in event.token_ids]
        assert tokens == FakeModel().generate(make_request("abc", max_tokens=3))

    async def test_says_when_a_request_first_ran(self) -> None:
        async with anyio.create_task_group() as group:
            await self.start(group)
            await self.inbox.send(make_request("abc", id="a", max_tokens=2))
            await self.inbox.send(Drain())
            async for turn in self.turns:
                await self.answer(turn)
        batches = await rest(self.events)
        assert [*batches[0].started] == ["a"] and batches[0].started["a"] > 0
        assert not any(batch.started for batch in batches[1:])

    async def test_refusals_of_the_scheduler_become_events(self) -> None:
        async with anyio.create_task_group() as group:
            await self.start(group)
            await self.inbox.send(make_request("x" * 600, id="long"))
            await self.inbox.send(Drain())
        (batch,) = await rest(self.events)
        (event,) = batch.events
        assert event.finish_reason is FinishReason.FAILED and isinstance(event.error, PromptTooLong)

    async def test_takes_messages_while_the_device_works(self) -> None:
        async with anyio.create_task_group() as group:
            scheduler = await self.start(group)
            await self.inbox.send(make_request("abc", id="a", max_tokens=9))
            turn = await self.turn()
            await self.inbox.send(Abort("a"))
            with anyio.fail_after(60):
                batches = [await self.events.receive(), await self.events.receive()]
            reasons = [event.finish_reason for batch in batches for event in batch.events]
            assert reasons == [FinishReason.ABORTED]
            await self.inbox.send(Drain())
            await self.answer(turn)
            async for turn in self.turns:
                await self.answer(turn)
        scheduler.check_integrity()

    async def test_a_failed_step_fails_its_requests(self) -> None:
        async with anyio.create_task_group() as group:
            scheduler = await self.start(group, fail=lambda plan: ValueError("no") if plan.step == 1 else None)
            await self.inbox.send(make_request("abc", id="a", max_tokens=9))
            await self.inbox.send(Drain())
            async for turn in self.turns:
                await self.answer(turn)
        events = [event for batch in await rest(self.events) for event in batch.events]
        assert events[-1].finish_reason is FinishReason.FAILED
        assert isinstance(events[-1].error.__cause__, ValueError)
        scheduler.check_integrity()

    async def test_pausing_waits_for_the_step_in_flight_and_steps_run_singly(self) -> None:
        quiet: OneShot[None] = OneShot()
        reports: list[OneShot[StepOutcome]] = [OneShot(), OneShot()]
        async with anyio.create_task_group() as group:
            await self.start(group)
            await self.inbox.send(make_request("abc", id="a", max_tokens=5))
            turn = await self.turn()
            await self.inbox.send(Pause(quiet))
            await anyio.wait_all_tasks_blocked()
            assert not quiet.filled
            await self.answer(turn)
            turn = await self.turn()
            assert turn.plan is None, "a step was planned in a paused session"
            await self.answer(turn)
            await self.delivered()
            assert quiet.filled
            for report in reports:
                await self.inbox.send(StepOnce(report))
            for _ in reports:
                for expects_plan in (True, False):
                    turn = await self.turn()
                    assert (turn.plan is not None) == expects_plan
                    await self.answer(turn)
            await self.inbox.send(Resume())
            await self.inbox.send(Drain())
            batches = []
            async for turn in self.turns:
                await self.answer(turn)
            batches = await rest(self.events)
        for batch in batches:
            run_calls(batch)
        steps = [(await report.get()).result.plan.step for report in reports]
        assert steps == [1, 2]

    async def test_a_step_of_a_running_session_is_refused(self) -> None:
        report: OneShot[StepOutcome] = OneShot()
        async with anyio.create_task_group() as group:
            await self.start(group)
            await self.inbox.send(StepOnce(report))
            await self.inbox.send(Drain())
        with pytest.raises(Exception, match="paused"):
            await report.get()

    async def test_exclusive_jobs_run_between_steps(self) -> None:
        done: OneShot[Any] = OneShot()
        after: list[Any] = []
        async with anyio.create_task_group() as group:
            await self.start(group)
            await self.inbox.send(make_request("abc", id="a", max_tokens=4))
            turn = await self.turn()
            await self.inbox.send(Exclusive(lambda: 42, after.append, done))
            await self.answer(turn)
            turn = await self.turn()
            assert turn.plan is None and turn.job is None
            await self.answer(turn)
            turn = await self.turn()
            assert turn.job is not None
            await self.inbox.send(outcome_of(self.engine, turn))
            turn = await self.turn()
            assert turn.plan is not None, "the session did not go on"
            await self.answer(turn)
            await self.inbox.send(Drain())
            async for turn in self.turns:
                await self.answer(turn)
        assert after == [42] and await done.get() == 42

    @pytest.mark.parametrize("pause", [0.0, 60.0], ids=["running", "stopped"])
    async def test_a_scheduler_that_waits_for_a_copy_is_asked_again(
        self, pause: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A process that was stopped for a minute, as by SIGSTOP, has not waited for a minute."""
        passed = 0.0
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed, perf_counter=time.perf_counter)
        monkeypatch.setattr(engine_module, "time", clock)

        class Waiting:
            has_work, asked = True, 0

            def plan(self) -> None:
                nonlocal passed
                self.asked += 1
                passed += pause
                if self.asked == 5:
                    self.has_work = False

            def submit(self, request: Request) -> None: ...

            def failures(self) -> tuple[()]:
                return ()

        scheduler: Any = Waiting()
        send, receive = anyio.create_memory_object_stream[Any](10)
        events, _events = anyio.create_memory_object_stream[Events](10)
        send.send_nowait(make_request("abc"))
        send.send_nowait(Drain())
        with anyio.fail_after(60):
            await Engine(scheduler, fake_engine().runner).schedule(receive, no_turn, events)
        assert scheduler.asked >= 5
        for stream in (send, _events):
            stream.close()

    def test_a_scheduler_that_plans_nothing_for_long_is_a_defect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = fake_engine()
        monkeypatch.setattr(type(made.scheduler), "has_work", True)
        times = iter(np.arange(0.0, 100.0, 0.5))
        monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=times.__next__))
        for _ in range(61):  # every half a second
            made.check_progress(None)
        with pytest.raises(AssertionError, match="no step was planned for 30 s"):
            made.check_progress(None)


class TestStep:
    async def test_reads_each_step_after_the_next_one_was_dispatched(self) -> None:
        made = fake_engine()
        made.scheduler.submit(make_request("abc", max_tokens=3))
        order = record_calls(made.runner)
        device, ended, last = DeviceThread(), list[OneShot[TurnOutcome]](), anyio.Event()
        for plan in (made.scheduler.plan(), made.scheduler.plan()):
            device.start(partial(made.advance, LoopTurn(plan)), ended.append)
        device.start(partial(made.advance, LoopTurn(None)), lambda outcome: (ended.append(outcome), last.set()))
        with anyio.fail_after(60):
            await last.wait()
        assert order == ["dispatch 0", "dispatch 1", "fetch 0", "fetch 1"]
        results = [outcome.result().result for outcome in ended]
        assert [result and result.plan.step for result in results] == [None, 0, 1]
        assert device.stop(5)

    async def test_a_failing_dispatch_leaves_the_step_before_it_alone(self) -> None:
        made = fake_engine(fail=lambda plan: ValueError("no") if plan.step == 1 else None)
        made.scheduler.submit(make_request("abc", max_tokens=3))
        first, second = made.scheduler.plan(), made.scheduler.plan()
        assert made.advance(LoopTurn(first)).result is None
        outcome = made.advance(LoopTurn(second))
        assert outcome.result.plan is first and made.awaited(LoopTurn(None)) is None
        ((failed, cause),) = outcome.failed
        assert failed is second and isinstance(cause, ValueError)

    async def test_an_outcome_is_let_go_of_once_it_was_taken(self) -> None:
        class Result: ...

        device, taken, results = DeviceThread(), anyio.Event(), list[Any]()

        def take(outcome: OneShot[Result]) -> None:
            results.append(weakref.ref(outcome.result()))
            taken.set()

        gc.disable()  # a cycle would keep it until a collection
        try:
            device.start(Result, take)
            with anyio.fail_after(60):
                await taken.wait()
            await device.run(int)  # the thread has ended the job before this one
            await anyio.wait_all_tasks_blocked()
            assert results[0]() is None
        finally:
            gc.enable()
        assert device.stop(5)

    async def test_the_session_ends_with_the_error_of_a_turn(self) -> None:
        made, device = fake_engine(), DeviceThread()
        made.advance = broken
        post, inbox = anyio.create_memory_object_stream[Any](100)
        outbox, events = anyio.create_memory_object_stream[Events](100)
        post.send_nowait(make_request("abc", id="a", max_tokens=3))
        group = pytest.RaisesGroup(pytest.RaisesExc(ZeroDivisionError), flatten_subgroups=True)
        with events, anyio.fail_after(60), group:
            await made.serve(inbox, post, outbox, device)
        assert device.stop(5)

    async def test_the_loop_stays_free_while_the_device_works(self) -> None:
        release = threading.Event()
        device = DeviceThread()
        ticks = 0
        async with anyio.create_task_group() as group:
            group.start_soon(device.run, lambda: release.wait(10))
            for _ in range(5):
                await anyio.sleep(0.001)
                ticks += 1
            release.set()
        assert ticks == 5 and device.stop(5)

    async def test_what_a_job_raises_comes_back_with_its_traceback(self) -> None:
        device = DeviceThread()
        with pytest.raises(ZeroDivisionError) as caught:
            await device.run(lambda: 1 / 0)
        assert "1 / 0" in str(caught.traceback[-1].statement)
        assert device.stop(5)
