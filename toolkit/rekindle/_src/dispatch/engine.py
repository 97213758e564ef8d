"""The engine: the only owner of a scheduler and a runner, and the one loop over them.

    plan      who runs in the next step, on which pages      scheduler, on the loop
    dispatch  hand the step to the device                    runner, on the device thread
    fetch     wait for the result of the step before it      runner, on the device thread
    commit    tokens, ends, pages for the prefix cache       scheduler, on the loop

`turn()` is this loop in one thread. A session runs the same three parts in two threads: `begin` and `end` on its event
loop, `advance` on its device thread, so that messages are taken while the device works.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.contracts import InFlightLike, RunnerLike, SchedulerLike
from rekindle._src.core.records import FinishReason, Request, Status, StepPlan, StepResult, TokenEvent
from rekindle._src.dispatch.backend import (
    Control,
    Drain,
    Events,
    Exclusive,
    LoopTurn,
    Pause,
    Resume,
    ScheduleMessage,
    StepOnce,
    StepOutcome,
    TurnOutcome,
    next_waiting,
    take,
)
from rekindle._src.dispatch.device import Device
from rekindle._src.dispatch.threads import DeviceThread, OneShot
from rekindle.errors import RekindleError

if TYPE_CHECKING:
    from rekindle._src.scheduling.sequence import Explanation

Observer = Callable[[StepResult], object]
STALL_SECONDS = 30.0  # how long a scheduler may have work and plan nothing before that counts as a defect


_DEFAULTS = EngineConfig()


class Engine:
    """A backend over one device or mesh. Steps are dispatched one ahead of their results, unless `ahead` is False."""

    def __init__(
        self,
        scheduler: SchedulerLike,
        runner: RunnerLike,
        config: EngineConfig = _DEFAULTS,
        device: Device | None = None,
        *,
        ahead: bool = True,
    ) -> None:
        self.scheduler, self.runner, self.device = scheduler, runner, device or Device()
        self.places: int = config.max_queue + config.max_requests
        self.bound: int = self.places
        self.watchdog = StepWatchdog(scheduler, runner, config)
        self.observers: list[Observer] = [self.watchdog]  # called with every committed step; they must be quick
        self._ahead = ahead
        self._in_flight: InFlightLike | None = None  # on the device; only `advance` changes it
        self._last: StepPlan | None = None  # dispatched, but its result was not requested yet
        self._turning = False  # a turn has begun and not ended
        self._pauses = 0
        self._quiet: list[OneShot[None]] = []  # callers that paused and wait for the steps in flight
        self._steps: deque[OneShot[StepOutcome]] = deque()  # requested single steps
        self._stepping: OneShot[StepOutcome] | None = None  # the one that runs
        self._exclusive: deque[Exclusive[Any]] = deque()
        self._job: Exclusive[Any] | None = None  # the one that runs
        self._draining = False
        self._events: list[TokenEvent] = []
        self._started: list[str] = []
        self._then: list[Callable[[], object]] = []  # called when callers have received all events so far
        self._waited: float | None = None  # seconds for which there was work and no plan
        self._looked = 0.0

    # The loop.

    def turn(self) -> tuple[TokenEvent, ...] | None:
        """Plan a step, dispatch it, fetch the step before it, and commit that one.

        Returns the events since the last turn; None if there was nothing to do.
        """
        turn = self.begin()
        if turn is None:
            return None
        self.end(self.advance(turn))
        batch = self.events()
        return () if batch is None else batch.events

    def begin(self) -> LoopTurn | None:
        """Plan the next step. Return the device's next turn, if it may have one now."""
        if self._turning:
            return None
        plan = self._plan()
        if plan is None and self._last is None:
            self._then += [partial(slot.put, None) for slot in self._quiet]
            self._quiet.clear()
            if not self._exclusive:
                return None
            self._job = self._exclusive.popleft()
            self._turning = True
            return LoopTurn(None, self._job.job)
        self._last, self._turning = plan, True
        return LoopTurn(plan)

    def advance(self, turn: LoopTurn) -> TurnOutcome:
        """Dispatch the turn's plan, then fetch the step that it awaits. Blocks until the device has finished that.

        The only place that waits for the device; dispatching may compile a program.
        """
        if turn.job is not None:
            assert self._in_flight is None, "a job runs while no step is in flight"
            try:
                return TurnOutcome(returned=turn.job())
            except Exception as error:
                return TurnOutcome(error=error)
        plan, last, result, failed = turn.plan, self._in_flight, None, []
        current, dispatch_error = None, None
        if plan is not None:
            self.watchdog.enter(plan, "in preparation (compiling included)")
            try:
                current = self.runner.dispatch(plan)
            except Exception as error:
                dispatch_error = error
        awaited = last
        if last is None and current is not None and self.awaited(turn) is plan:
            awaited, current = current, None
        if awaited is not None:
            self.watchdog.enter(awaited.plan, ON_DEVICE)
            try:
                result = self.runner.fetch(awaited)
            except Exception as error:
                failed.append((awaited.plan, error))
        if plan is not None and dispatch_error is not None:
            failed.append((plan, dispatch_error))
        self.watchdog.leave()
        self._in_flight = current
        return TurnOutcome(result, tuple(failed))

    def awaited(self, turn: LoopTurn) -> StepPlan | None:
        """Return the step that a turn fetches: the one in flight, or its own if the next plan needs its result."""
        if self._in_flight is not None:
            return self._in_flight.plan
        # Reading a step with drafts right away saves a round trip to the scheduler.
        return turn.plan if turn.plan is not None and (turn.plan.holds_next or not self._ahead) else None

    def end(self, outcome: TurnOutcome) -> None:
        """Commit the results of a turn."""
        self._turning = False
        if self._job is not None:
            job, self._job = self._job, None
            _end_job(job, outcome)
            return
        events: list[TokenEvent] = []
        if outcome.result is not None:
            events += self.scheduler.commit(outcome.result)
            if self._last is outcome.result.plan:
                self._last = None
            for observe in self.observers:
                observe(outcome.result)
        for plan, cause in outcome.failed:
            events += self.scheduler.fail(plan, cause)
            if self._last is plan:
                self._last = None
        if outcome.failed:
            self._exclusive.appendleft(Exclusive(self.device.recover, self._recovered, OneShot(), vital=True))
        self._events += events
        if self._stepping is None:
            return
        if outcome.failed:
            self._stepping.fail(outcome.failed[0][1])
            self._stepping = None
        elif outcome.result is not None:
            self._report(StepOutcome(outcome.result, tuple(events)))

    def events(self) -> Events | None:
        """Return the events since the last call; None if there are none."""
        self._events += self.scheduler.failures()
        if not (self._events or self._started or self._then):
            return None
        started = dict.fromkeys(self._started, time.perf_counter()) if self._started else {}
        batch = Events(tuple(self._events), started, tuple(self._then))
        self._events, self._started, self._then = [], [], []
        return batch

    # Requests and controls.

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `PromptTooLong`, `OutOfPages` or `QueueFull`."""
        self.scheduler.submit(request)

    def abort(self, request_id: str) -> None:
        self._add(self.scheduler.abort(request_id))

    def finish(self, request_id: str, reason: FinishReason) -> None:
        self._add(self.scheduler.finish(request_id, reason))

    def fail(self, request_id: str, error: RekindleError) -> None:
        """End a request that the scheduler did not take."""
        self._add(TokenEvent(request_id, finish_reason=FinishReason.FAILED, error=error))

    def control(self, message: Control | Drain) -> None:
        match message:
            case Pause(quiet):
                self._pauses += 1
                self._quiet.append(quiet)
            case Resume():
                self._pauses = max(0, self._pauses - 1)
                self._refuse_steps()
            case StepOnce(report):
                self._steps.append(report)
                self._refuse_steps()
            case Exclusive():
                self._exclusive.append(message)
            case Drain():
                # A paused session that is closed runs freely again: no caller is left to step it.
                self._draining, self._pauses = True, 0
                self._refuse_steps()

    def status(self, request_id: str) -> Status | None:
        return self.scheduler.status(request_id)

    def explain(self, request_id: str) -> Explanation | None:
        return cast("Explanation | None", self.scheduler.explain(request_id))

    def attach(self, lost: Callable[[BaseException], object], resize: Callable[[int], object]) -> None:
        """Have `lost` called, from any thread, when a process that shares the model is gone."""
        self.device.watch(lost)

    def close(self) -> None:
        """Free the device memory, then the resources that the runner does not own."""
        try:
            self.runner.close()
        finally:
            self.device.close()

    # The tasks of a session.

    async def serve(
        self,
        inbox: MemoryObjectReceiveStream[ScheduleMessage],
        post: MemoryObjectSendStream[ScheduleMessage],
        outbox: MemoryObjectSendStream[Events],
        device: DeviceThread,
    ) -> None:
        """Run until a `Drain` has come and no request is left. The outcome of a turn is a message like others."""

        def ended(outcome: OneShot[TurnOutcome]) -> None:
            with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # cancelled meanwhile
                try:
                    post.send_nowait(outcome)
                except anyio.WouldBlock:
                    watching.start_soon(post.send, outcome)

        def start(turn: LoopTurn) -> None:
            self.watchdog.wake()
            device.start(partial(self.advance, turn), ended)

        async with post, anyio.create_task_group() as watching:
            watching.start_soon(self.watchdog.run)
            await self.schedule(inbox, start, outbox)
            watching.cancel_scope.cancel()

    async def schedule(
        self,
        inbox: MemoryObjectReceiveStream[ScheduleMessage],
        start: Callable[[LoopTurn], object],
        outbox: MemoryObjectSendStream[Events],
    ) -> None:
        """Decide after every message whether the device gets another turn, and `start` it.

        Each `await` of a stream is a round of the event loop, which a small model's step would notice, so a stream with
        room is not awaited.
        """
        async with inbox, outbox:
            while True:
                if self._waited is None:
                    self._take(await inbox.receive())
                else:
                    with anyio.move_on_after(0.005):
                        self._take(await inbox.receive())
                while (message := next_waiting(inbox)) is not None:
                    self._take(message)
                turn = self.begin()
                if turn is not None:
                    start(turn)  # before the events: the device may be waiting
                if (events := self.events()) is not None:
                    try:
                        outbox.send_nowait(events)
                    except anyio.WouldBlock:
                        await outbox.send(events)
                if turn is not None:
                    continue
                if self._drained:
                    return
                if self._idle and (self._pauses > 0 or not self.scheduler.has_work):
                    self.watchdog.rest()

    # Inside.

    @property
    def _idle(self) -> bool:
        return self._last is None and not self._turning

    @property
    def _drained(self) -> bool:
        return self._draining and self._idle and not self.scheduler.has_work and not self._exclusive

    def _take(self, message: ScheduleMessage) -> None:
        if isinstance(message, OneShot):
            self.end(message.result())
        else:
            take(self, message)

    def _add(self, event: TokenEvent | None) -> None:
        if event is not None:
            self._events.append(event)

    def _plan(self) -> StepPlan | None:
        paused = self._pauses and (self._last is not None or not self._steps)
        if self._exclusive or self._stepping is not None or paused:
            self._waited = None
            return None
        if self._pauses:
            self._stepping = self._steps.popleft()
        # A single step waits for its programs, so that its caller sees the same rows each time.
        plan = self.scheduler.plan() if self._stepping is None else self.scheduler.plan(now=True)
        if plan is not None:
            self._started += [row.request.id for row in plan.rows if row.fresh]
        elif self._stepping is not None:
            self._report(StepOutcome(None, ()))
        self.check_progress(plan)
        return plan

    def check_progress(self, plan: StepPlan | None) -> None:
        """Raise if a scheduler with work and no plan, which waits for a copy, waits longer than any copy takes."""
        now = time.monotonic()
        if plan is not None or self._last is not None or not self.scheduler.has_work:
            self._waited = None
        elif self._waited is None:
            self._waited = 0.0
        else:
            # Of a time in which the process was stopped, or its machine, it has waited for next to nothing.
            self._waited += min(now - self._looked, 1.0)
            if self._waited > STALL_SECONDS and not self.scheduler.held:  # a disk may take as long as it likes
                raise AssertionError(f"requests wait, but no step was planned for {STALL_SECONDS:.0f} s")
        self._looked = now

    def _recovered(self, lost: bool) -> None:
        if lost:
            self.scheduler.flush_cache(recompute=True)

    def _report(self, stepped: StepOutcome) -> None:
        assert self._stepping is not None
        self._then.append(partial(self._stepping.put, stepped))
        self._stepping = None

    def _refuse_steps(self) -> None:
        while not self._pauses and self._steps:
            self._steps.popleft().fail(
                RekindleError("step() was called while the session runs freely. Use it within session.paused()")
            )


def _end_job(job: Exclusive[Any], outcome: TurnOutcome) -> None:
    if outcome.error is not None:
        job.done.fail(outcome.error)
        if job.vital:
            raise outcome.error
        return
    try:
        job.after(outcome.returned)
    except Exception as error:
        job.done.fail(error)
    else:
        job.done.put(outcome.returned)


log = logging.getLogger("rekindle.steps")
SHOWN = 8  # requests of a step that a warning names
SHORTEST_SLEEP = 0.01
ON_DEVICE = "on the device"  # state of a dispatched step that has not ended; compiling is over then


class StepFigures(NamedTuple):
    """Figures of the steps so far."""

    slow_steps: int  # took longer than `step_timeout`, including one that still runs
    stalled: str  # the step that has been running for longer than `step_timeout`; empty if there is none
    idle_seconds: float  # the device had nothing to do although requests were there
    idle_share: float  # of the time in which requests were there


class _Activity(NamedTuple):
    plan: StepPlan
    state: str
    since: float


class StepWatchdog:
    """Follows every step. It logs nothing unless `log_every` is set or a step takes longer than `step_timeout`.

    The device thread records its waits with `enter` and `leave`. `run` checks them from the event loop, which
    stays free while the device hangs; it sleeps while no step runs.
    """

    def __init__(self, scheduler: SchedulerLike, runner: RunnerLike, config: EngineConfig) -> None:
        self._scheduler, self._runner, self._config = scheduler, runner, config
        self._steps = self._sequences = self._tokens = self._cached = 0
        self._began = time.perf_counter()
        self._activity: _Activity | None = None
        self._reported: StepPlan | None = None  # the latest step that was reported as slow
        self._asleep: anyio.Event | None = None
        self._slow = 0
        self._idle = self._busy = self._idle_before = self._busy_before = 0.0
        self._rested = True  # no step was wanted for a time since the last one; that time is not counted as idle

    # -- the running step

    def enter(self, plan: StepPlan, state: str) -> None:
        """Record the step that the device thread waits for from now on."""
        self._activity = _Activity(plan, state, time.perf_counter())

    def leave(self) -> None:
        """Record that the device thread waits for nothing."""
        self._activity = None

    def wake(self) -> None:
        """Wake up before a step runs. Called on the loop."""
        if self._asleep is not None:
            self._asleep.set()

    async def run(self) -> None:
        """Report steps while they hang, until cancelled."""
        limit = self._config.step_timeout
        while True:
            activity = self._activity
            if activity is None:
                self._asleep = anyio.Event()
                await self._asleep.wait()
                self._asleep = None
                # A step that begins now cannot be over its limit before this has passed.
                await anyio.sleep(max(limit, SHORTEST_SLEEP))
                continue
            left = activity.since + limit - time.perf_counter()
            if left <= 0 and activity.plan is not self._reported:
                self._count_slow(activity.plan)
                log.warning("%s", self._stalled(activity))
            await anyio.sleep(max(left if left > 0 else limit, SHORTEST_SLEEP))

    def _stalled(self, activity: _Activity) -> str:
        seconds, limit = time.perf_counter() - activity.since, self._config.step_timeout
        return (
            f"step {activity.plan.step} has been {activity.state} for {seconds:.1f} s (limit {limit:.1f}), "
            f"{self._describe(activity.plan)}"
        )

    def _describe(self, plan: StepPlan, program: str = "") -> str:
        if not program:
            program = self._runner.program(plan)
        rows = [f"{row.request.id} [{row.start}, {row.start + row.length})" for row in plan.rows[:SHOWN]]
        rows += [f"{len(plan.rows) - SHOWN} more"] * (len(plan.rows) > SHOWN)
        return (
            f"program {program}, {len(plan.decode)} decode rows and {plan.prefill_tokens} prefill tokens: "
            f"{', '.join(rows)}"
        )

    def _count_slow(self, plan: StepPlan) -> None:
        self._reported = plan
        self._slow += 1

    # -- committed steps

    def rest(self) -> None:
        """Note that no step is wanted, without requests or while paused. This time doesn't count as idle."""
        self._rested = True

    def __call__(self, result: StepResult) -> None:
        """Record a committed step."""
        seconds = result.host_seconds + result.device_seconds
        if seconds > self._config.step_timeout:
            if result.plan is not self._reported:
                self._count_slow(result.plan)
            log.warning(
                "step %d took %.1f s (limit %.1f), %s",
                result.plan.step, seconds, self._config.step_timeout, self._describe(result.plan, result.program),
            )  # fmt: skip
        self._busy += result.device_seconds
        if not self._rested:
            self._idle += result.idle_seconds
        self._rested = False
        if not self._config.log_every:
            return
        self._steps += 1
        self._sequences += sum(row.fresh for row in result.plan.rows)
        self._tokens += result.sampled
        if self._steps % self._config.log_every == 0:
            self._line()

    def figures(self) -> StepFigures:
        """Return the figures now, including a step that hangs. Call it on the loop."""
        activity = self._activity
        share = _share(self._idle, self._busy)
        if activity is None or time.perf_counter() - activity.since <= self._config.step_timeout:
            return StepFigures(self._slow, "", self._idle, share)
        uncounted = activity.plan is not self._reported  # `run` has not seen it yet
        return StepFigures(self._slow + uncounted, self._stalled(activity), self._idle, share)

    def _line(self) -> None:
        now, statistics = time.perf_counter(), self._scheduler.statistics()
        cached = statistics.cached_tokens - self._cached
        idle = _share(self._idle - self._idle_before, self._busy - self._busy_before)
        log.info(
            "steps=%d new_sequences=%d new_tokens=%d cached_tokens=%d pages_used=%d/%d running=%d queued=%d "
            "tokens_per_s=%.1f idle=%.1f%% compilations=%d",
            self._steps, self._sequences, self._tokens, cached, statistics.pages_total - statistics.pages_free,
            statistics.pages_total, statistics.running, statistics.waiting, self._tokens / (now - self._began),
            100 * idle, self._runner.statistics().compilations,
        )  # fmt: skip
        self._cached, self._began, self._sequences, self._tokens = statistics.cached_tokens, now, 0, 0
        self._idle_before, self._busy_before = self._idle, self._busy


def _share(idle: float, busy: float) -> float:
    return idle / (idle + busy) if idle else 0.0
