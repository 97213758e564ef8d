"""Reports on steps through `logging` and in the statistics: progress, slow steps, steps that hang."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import anyio

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.contracts import RunnerLike, SchedulerLike
from rekindle._src.core.records import StepPlan, StepResult

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
