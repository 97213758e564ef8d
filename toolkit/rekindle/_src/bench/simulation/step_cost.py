"""What a step costs, as a linear function of what it computes, fitted to the steps of a real session.

Steps of one size take now less and now more, as what else the machine does: half of them less than the function says.
By how much is the spread, which a simulation draws from.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rekindle._src.core.records import StepPlan, StepResult

_ROUNDS = 12  # of reweighting, after which the fit stands still
_SURE = 0.02  # relative errors below count as equal


class StepWork(NamedTuple):
    """What a step computes."""

    rows: int  # that decode
    prefill: int  # tokens of prompts
    context: int  # positions that the rows look back at
    chunks: int = 0  # prompts that these tokens belong to

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        return cls(len(plan.decode), plan.prefill_tokens, sum(row.start for row in plan.rows), len(plan.prefill))


@dataclasses.dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, and of its parts."""

    step: float
    row: float
    prefill: float  # of a prompt's token
    context: float  # of a position that is looked back at
    chunk: float = 0.0  # of each prompt in the step, however short its part
    request: float = 0.0  # of a request beside its steps: from the caller to its first step, and back from there

    def seconds(self, work: StepWork) -> float:
        of_prompts = self.prefill * work.prefill + self.chunk * work.chunks
        return self.step + self.row * work.rows + of_prompts + self.context * work.context

    @classmethod
    def fitted(cls, steps: Sequence[tuple[StepWork, float]]) -> StepCost:
        """The cost that half of the measured steps of any size stay below; no part of it is negative."""
        if not steps:
            raise ValueError("no steps were measured")
        wanted = np.array([(1, *work) for work, _ in steps], np.float64)
        seconds = np.maximum(np.array([taken for _, taken in steps], np.float64), 1e-7)
        # Relative errors count: a step of decode rows is as important as a prefill of 512 tokens. Their absolute values
        # are made least, not their squares, by weighing each step with its error in the round before: steps that shared
        # their time with something else would draw a mean away from what is usual.
        told, weights = seconds, np.ones(len(steps))
        found = np.zeros(5)
        for _ in range(_ROUNDS):
            scale = weights / told
            found = _nonnegative(wanted * scale[:, None], seconds * scale)
            told = np.maximum(wanted @ found, 1e-7)
            weights = 1 / np.sqrt(np.maximum(np.abs(seconds / told - 1), _SURE))
        return cls(*found.tolist())

    def spread(self, steps: Sequence[tuple[StepWork, float]], points: int = 100) -> tuple[float, ...]:
        """How many times longer than this says measured steps took: so many quantiles, in order."""
        ratios = [seconds / max(self.seconds(work), 1e-7) for work, seconds in steps]
        return tuple(np.quantile(ratios, (np.arange(points) + 0.5) / points).tolist())


def _nonnegative(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Least squares without negative coefficients: those that would be are left out, the most negative first."""
    used = list(range(matrix.shape[1]))
    while True:
        solution = np.linalg.lstsq(matrix[:, used], values, rcond=None)[0]
        if not len(solution) or solution.min() >= 0:
            found = np.zeros(matrix.shape[1])
            found[used] = solution
            return found
        del used[int(solution.argmin())]


class StepTimes:
    """An observer of a session: what its steps computed, and the seconds from the step before to each.

    What the host does between two steps is part of that. A step that had to wait for requests counts with the time that
    it took itself.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps: list[tuple[StepWork, float]] = []
        self._clock = clock
        self._last: tuple[float, frozenset[str]] = (0.0, frozenset())

    def __call__(self, result: StepResult) -> None:
        now, requests = self._clock(), frozenset(row.request.id for row in result.plan.rows)
        at, before = self._last
        went_on = not before.isdisjoint(requests)
        self.steps.append((StepWork.of(result.plan), now - at if went_on else result.device_seconds))
        self._last = now, requests
