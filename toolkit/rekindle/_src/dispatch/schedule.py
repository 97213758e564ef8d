"""Schedule: the only owner of the scheduler. It decides after every message whether the device gets another step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rekindle._src.core.contracts import SchedulerLike
from rekindle._src.core.own_failure import own_failure
from rekindle._src.core.records import FinishReason, Request, StepPlan, StepResult, TokenEvent
from rekindle._src.dispatch.mailbox import OneShot
from rekindle._src.dispatch.messages import (
    Abort,
    Drain,
    Events,
    Exclusive,
    Finish,
    Outcome,
    Pause,
    Resume,
    ScheduleMessage,
    StepOnce,
    Stepped,
    Turn,
    next_waiting,
)
from rekindle.errors import RekindleError

Observer = Callable[[StepResult], object]
STALL_SECONDS = 30.0  # how long a scheduler may have work and plan nothing before that counts as a defect


async def run(
    inbox: MemoryObjectReceiveStream[ScheduleMessage],
    turns: MemoryObjectSendStream[Turn],
    outbox: MemoryObjectSendStream[Events],
    scheduler: SchedulerLike,
    recover: Callable[[], bool] | None = None,
    observers: Sequence[Observer] = (),
    rest: Callable[[], object] = lambda: None,
) -> None:
    """Run until a `Drain` has come and no request is left. `recover` is called on the device after a failed step.

    `observers` are called with every committed step and must be quick. `rest` is called when no step is wanted: there
    are no requests, or the session is paused.
    """
    state = ScheduleState(scheduler, recover, observers)
    async with inbox, turns, outbox:
        while True:
            with anyio.move_on_after(state.patience):
                state.take(await inbox.receive())
            while (message := next_waiting(inbox)) is not None:
                state.take(message)
            turn = state.next_turn()
            if (events := state.events()) is not None:
                await outbox.send(events)
            if turn is not None:
                await turns.send(turn)
            elif state.drained:
                return
            elif state.resting:
                rest()


class ScheduleState:
    """The synchronous core of the task: messages in, turns and events out."""

    def __init__(
        self,
        scheduler: SchedulerLike,
        recover: Callable[[], bool] | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._scheduler = scheduler
        self._observers = observers
        self._recover = recover
        self._last: StepPlan | None = None  # dispatched, but its result was not requested yet
        self._turning = False  # a turn was sent and its outcome has not come
        self._pauses = 0
        self._quiet: list[OneShot[None]] = []  # callers that paused and wait for the steps in flight
        self._steps: deque[OneShot[Stepped]] = deque()  # requested single steps
        self._stepping: OneShot[Stepped] | None = None  # the one that runs
        self._exclusive: deque[Exclusive] = deque()
        self._job: Exclusive | None = None  # the one that runs
        self._draining = False
        self._events: list[TokenEvent] = []
        self._started: list[str] = []
        self._then: list[Callable[[], object]] = []  # called when callers have received all events so far
        self._stalled_since: float | None = None

    @property
    def idle(self) -> bool:
        return self._last is None and not self._turning

    @property
    def drained(self) -> bool:
        return self._draining and self.idle and not self._scheduler.has_work and not self._exclusive

    @property
    def resting(self) -> bool:
        """True if no step is wanted."""
        return self.idle and (self._pauses > 0 or not self._scheduler.has_work)

    @property
    def patience(self) -> float | None:
        """Seconds to wait for a message before planning again; None waits without a limit."""
        return None if self._stalled_since is None else 0.005

    def take(self, message: ScheduleMessage) -> None:
        match message:
            case Request():
                self._for_request(message.id, partial(self._scheduler.submit, message))
            case Outcome():
                self._take_outcome(message)
            case Abort(request_id):
                self._for_request(request_id, partial(self._scheduler.abort, request_id))
            case Finish(request_id, reason):
                self._for_request(request_id, partial(self._scheduler.finish, request_id, reason))
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

    def next_turn(self) -> Turn | None:
        """Return the device's next turn, if it may have one now."""
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
            return Turn(None, self._job.job)
        self._last, self._turning = plan, True
        return Turn(plan)

    def events(self) -> Events | None:
        """Return the events since the last call."""
        if not (self._events or self._started or self._then):
            return None
        batch = Events(tuple(self._events), tuple(self._started), time.perf_counter(), tuple(self._then))
        self._events, self._started, self._then = [], [], []
        return batch

    def _plan(self) -> StepPlan | None:
        paused = self._pauses and (self._last is not None or not self._steps)
        if self._exclusive or self._stepping is not None or paused:
            self._stalled_since = None
            return None
        if self._pauses:
            self._stepping = self._steps.popleft()
        plan = self._scheduler.plan()
        if plan is not None:
            self._started += [row.request.id for row in plan.rows if row.fresh]
        elif self._stepping is not None:
            self._report(Stepped(None, ()))
        self._watch(plan)
        return plan

    def _watch(self, plan: StepPlan | None) -> None:
        """Raise if a scheduler with work and no plan, which waits for a copy, waits longer than any copy takes."""
        if plan is not None or self._last is not None or not self._scheduler.has_work:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = time.monotonic()
        elif time.monotonic() - self._stalled_since > STALL_SECONDS:
            raise AssertionError(f"requests wait, but no step was planned for {STALL_SECONDS:.0f} s")

    def _take_outcome(self, outcome: Outcome) -> None:
        self._turning = False
        if self._job is not None:
            job, self._job = self._job, None
            self._end_job(job, outcome)
            return
        events: list[TokenEvent] = []
        if outcome.result is not None:
            events += self._scheduler.commit(outcome.result)
            if self._last is outcome.result.plan:
                self._last = None
            for observe in self._observers:
                observe(outcome.result)
        for plan, cause in outcome.failed:
            events += self._scheduler.fail(plan, cause)
            if self._last is plan:
                self._last = None
        if outcome.failed and self._recover is not None:
            self._exclusive.appendleft(Exclusive(self._recover, self._recovered, OneShot(), vital=True))
        self._events += events
        if self._stepping is None:
            return
        if outcome.failed:
            self._stepping.fail(outcome.failed[0][1])
            self._stepping = None
        elif outcome.result is not None:
            self._report(Stepped(outcome.result, tuple(events)))

    def _end_job(self, job: Exclusive, outcome: Outcome) -> None:
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

    def _recovered(self, lost: bool) -> None:
        if lost:
            self._scheduler.flush_cache(recompute=True)

    def _report(self, stepped: Stepped) -> None:
        assert self._stepping is not None
        self._then.append(partial(self._stepping.put, stepped))
        self._stepping = None

    def _refuse_steps(self) -> None:
        while not self._pauses and self._steps:
            self._steps.popleft().fail(
                RekindleError("step() was called while the session runs freely. Use it within session.paused()")
            )

    def _for_request(self, request_id: str, change: Callable[[], TokenEvent | None]) -> None:
        """Make a change that concerns one request, which fails if the change does."""
        try:
            event = change()
        except BaseException as error:
            failure = own_failure(error, f"request {request_id} could not be scheduled")
            event = TokenEvent(request_id, finish_reason=FinishReason.FAILED, error=failure)
        if event is not None:
            self._events.append(event)
