"""The last steps of a session for a dashboard: their requests by slot, token counts and times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from rekindle._src.core.records import StepResult


class StepRecord(NamedTuple):
    """One step."""

    at: float  # time.perf_counter() when it was committed
    step: int
    rows: tuple[tuple[int, str, str], ...]  # slot, request, "prefill" or "decode"
    sampled: int  # tokens sampled
    computed: int
    moved: int  # pages offloaded and restored
    seconds: float  # on the device
    busy: float = 0.0  # seconds since the previous step if a request ran in both, else seconds on the device


class Recorder:
    """Remembers the last steps. It is called on the session's loop after each step and read from any thread."""

    def __init__(self, steps: int = 240, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.steps: deque[StepRecord] = deque(maxlen=steps)
        self._gaps: deque[float] = deque(maxlen=steps)
        self._last: tuple[float, set[str]] = (0.0, set())

    def __call__(self, result: StepResult) -> None:
        plan = result.plan
        rows = [(row.slot, row.request.id, "prefill") for row in plan.prefill]
        rows += [(row.slot, row.request.id, "decode") for row in plan.decode if not row.draft]
        now, requests = self._clock(), {row[1] for row in rows}
        busy = result.device_seconds
        if not requests.isdisjoint(self._last[1]):
            busy = now - self._last[0]
            self._gaps.append(busy)
        self._last = now, requests
        self.steps.append(
            StepRecord(
                at=now,
                step=plan.step,
                rows=tuple(rows),
                sampled=result.sampled,
                computed=plan.tokens,
                moved=len(plan.offload) + len(plan.restore),
                seconds=result.device_seconds,
                busy=busy,
            )
        )

    def rate(self, window: float = 2.0) -> float:
        """Return tokens per second while requests ran, over the steps of the last `window` seconds; 0 without steps.

        Time without requests does not count, so a short answer has the same rate as in its completion. Nor does the
        time before the oldest recorded step: fast steps fill the record in a fraction of the window.
        """
        since = self._clock() - window
        recent = [step for step in tuple(self.steps) if step.at > since]
        busy = sum(step.busy for step in recent)
        return sum(step.sampled for step in recent) / busy if busy else 0.0

    def slowest(self) -> float:
        """Return the 99th percentile of the seconds between two tokens of a request, over the recorded steps."""
        gaps = sorted(self._gaps)
        return gaps[int(0.99 * (len(gaps) - 1))] if gaps else 0.0
