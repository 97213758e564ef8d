"""Step and its device thread by themselves: turns in, outcomes out."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from helpers.fakes import make_request
from helpers.sessions import fake_engine
from helpers.task_streams import rest
from rekindle._src.dispatch import step
from rekindle._src.dispatch.device import DeviceThread
from rekindle._src.dispatch.messages import Turn

pytestmark = pytest.mark.anyio


class TestStep:
    async def test_reads_each_step_after_the_next_one_was_dispatched(self) -> None:
        made = fake_engine()
        made.scheduler.submit(make_request("abc", max_tokens=3))
        order: list[str] = []
        dispatch, fetch = made.runner.dispatch, made.runner.fetch
        made.runner.dispatch = lambda plan: (order.append(f"dispatch {plan.step}"), dispatch(plan))[1]
        made.runner.fetch = lambda flight: (order.append(f"fetch {flight.plan.step}"), fetch(flight))[1]
        device = DeviceThread()
        turns, inbox = anyio.create_memory_object_stream[Turn](4)
        outbox, outcomes = anyio.create_memory_object_stream[Any](4)
        for plan in (made.scheduler.plan(), made.scheduler.plan(), None):
            turns.send_nowait(Turn(plan))
        turns.close()
        with anyio.fail_after(10):
            await step.run(inbox, outbox, made.runner, device)
        assert order == ["dispatch 0", "dispatch 1", "fetch 0", "fetch 1"]
        results = [outcome.result for outcome in await rest(outcomes)]
        assert [result and result.plan.step for result in results] == [None, 0, 1]
        assert device.stop(5)

    async def test_a_failing_dispatch_leaves_the_step_before_it_alone(self) -> None:
        made = fake_engine(fail=lambda plan: ValueError("no") if plan.step == 1 else None)
        made.scheduler.submit(make_request("abc", max_tokens=3))
        first, second = made.scheduler.plan(), made.scheduler.plan()
        _, flight = step.advance(made.runner, first, None)
        outcome, current = step.advance(made.runner, second, flight)
        assert outcome.result.plan is first and current is None
        ((failed, cause),) = outcome.failed
        assert failed is second and isinstance(cause, ValueError)

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
