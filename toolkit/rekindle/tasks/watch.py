"""What a session says through `logging`: one line per so many steps, and steps that took longer than they should."""

from __future__ import annotations

import logging
import time

from rekindle.config import EngineConfig
from rekindle.engine.base import RunnerLike, SchedulerLike
from rekindle.records import StepResult

log = logging.getLogger("rekindle.steps")


class Watch:
    """Sees every committed step. Quiet unless `log_every` is set or a step is slower than `step_timeout`."""

    def __init__(self, scheduler: SchedulerLike, runner: RunnerLike, config: EngineConfig) -> None:
        self._scheduler, self._runner, self._config = scheduler, runner, config
        self._steps = self._sequences = self._tokens = self._cached = 0
        self._began = time.perf_counter()

    def __call__(self, result: StepResult) -> None:
        seconds = result.host_seconds + result.device_seconds
        if seconds > self._config.step_timeout:
            rows = ", ".join(
                f"{row.request.id} [{row.start}, {row.start + row.length})" for row in result.plan.rows[:8]
            )
            log.warning(
                "step %d took %.1f s (limit %.1f), program %s, %d decode rows and %d prefill tokens: %s",
                result.plan.step, seconds, self._config.step_timeout, result.program,
                len(result.plan.decode), result.plan.prefill_tokens, rows,
            )  # fmt: skip
        if not self._config.log_every:
            return
        self._steps += 1
        self._sequences += sum(row.fresh for row in result.plan.rows)
        self._tokens += sum(row.token_id is not None for row in result.rows)
        if self._steps % self._config.log_every == 0:
            self._line()

    def _line(self) -> None:
        now, statistics = time.perf_counter(), self._scheduler.statistics()
        cached = statistics.cached_tokens - self._cached
        log.info(
            "steps=%d new_sequences=%d new_tokens=%d cached_tokens=%d pages_used=%d/%d running=%d queued=%d "
            "tokens_per_s=%.1f compilations=%s",
            self._steps, self._sequences, self._tokens, cached, statistics.pages_total - statistics.pages_free,
            statistics.pages_total, statistics.running, statistics.waiting, self._tokens / (now - self._began),
            getattr(self._runner.statistics(), "compilations", "-"),
        )  # fmt: skip
        self._cached, self._began, self._sequences, self._tokens = statistics.cached_tokens, now, 0, 0
