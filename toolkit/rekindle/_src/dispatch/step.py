"""Step: dispatches each plan and waits for the step before it, so that the device never waits for the host."""

from __future__ import annotations

from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rekindle._src.core.contracts import InFlightLike, RunnerLike
from rekindle._src.core.records import StepPlan
from rekindle._src.dispatch.device import DeviceThread
from rekindle._src.dispatch.messages import Outcome, ScheduleMessage, Turn
from rekindle._src.dispatch.step_watchdog import ON_DEVICE, StepWatchdog


async def run(
    inbox: MemoryObjectReceiveStream[Turn],
    outbox: MemoryObjectSendStream[ScheduleMessage],
    runner: RunnerLike,
    device: DeviceThread,
    watchdog: StepWatchdog | None = None,
) -> None:
    """Answer every turn with one outcome until the inbox ends. `watchdog` is notified of each wait."""
    last: InFlightLike | None = None
    async with inbox, outbox:
        async for turn in inbox:
            if watchdog is not None:
                watchdog.wake()
            outcome, last = await wait_for_device(device, runner, turn, last, watchdog)
            await outbox.send(outcome)


async def wait_for_device(
    device: DeviceThread,
    runner: RunnerLike,
    turn: Turn,
    last: InFlightLike | None,
    watchdog: StepWatchdog | None = None,
) -> tuple[Outcome, InFlightLike | None]:
    """Run a turn; the only place that waits for the device. Includes dispatching, because it may compile a program."""
    if turn.job is not None:
        assert last is None, "a job runs while no step is in flight"
        try:
            return Outcome(returned=await device.run(turn.job)), None
        except Exception as error:
            return Outcome(error=error), None
    return await device.run(lambda: advance(runner, turn.plan, last, watchdog))


def advance(
    runner: RunnerLike, plan: StepPlan | None, last: InFlightLike | None, watchdog: StepWatchdog | None = None
) -> tuple[Outcome, InFlightLike | None]:
    """Dispatch `plan`, then read the step before it. Runs on the device thread; returns the step now in flight too."""
    current, result, failed = None, None, []
    dispatch_error: Exception | None = None
    if plan is not None:
        if watchdog is not None:
            watchdog.enter(plan, "in preparation (compiling included)")
        try:
            current = runner.dispatch(plan)
        except Exception as error:
            dispatch_error = error
    awaited = last
    if last is None and current is not None and current.plan.drafted:
        # The next plan needs this step's result. Reading it right away saves a round trip to the scheduler.
        awaited, current = current, None
    if awaited is not None:
        if watchdog is not None:
            watchdog.enter(awaited.plan, ON_DEVICE)
        try:
            result = runner.fetch(awaited)
        except Exception as error:
            failed.append((awaited.plan, error))
    if plan is not None and dispatch_error is not None:
        failed.append((plan, dispatch_error))
    if watchdog is not None:
        watchdog.leave()
    return Outcome(result, tuple(failed)), current
