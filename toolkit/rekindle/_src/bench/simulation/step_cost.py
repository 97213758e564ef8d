"""The cost of a step, as a linear function of its work, fitted to the steps of a real session.

Steps of one size vary with the machine's other work: half of them take less time than the function says. The spread
has the ratios, from which a simulation draws.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rekindle._src.core.records import StepPlan, StepResult

_ROUNDS = 12  # of reweighting, after which the fit no longer changes
_SURE = 0.02  # smaller relative errors count as equal


class StepWork(NamedTuple):
    """The work of a step."""

    rows: int  # decoding ones
    prefill: int  # tokens of prompts
    context: int  # positions to which the rows attend
    chunks: int = 0  # prompts of these tokens

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        return cls(len(plan.decode), plan.prefill_tokens, sum(row.start for row in plan.rows), len(plan.prefill))


@dataclasses.dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, and of its parts."""

    step: float
    row: float
    prefill: float  # of a prompt's token
    context: float  # of a position attended to
    chunk: float = 0.0  # of each prompt in the step, however short its part
    request: float = 0.0  # of a request beside its steps: from the caller to the first step, and back

    def seconds(self, work: StepWork) -> float:
        of_prompts = self.prefill * work.prefill + self.chunk * work.chunks
        return self.step + self.row * work.rows + of_prompts + self.context * work.context

    @classmethod
    def fit(cls, steps: Sequence[tuple[StepWork, float]]) -> StepCost:
        """Return the cost that half of the measured steps of any size stay below; no part is negative."""
        if not steps:
            raise ValueError("no steps were measured")
        features = np.array([(1, *work) for work, _ in steps], np.float64)
        seconds = np.maximum(np.array([duration for _, duration in steps], np.float64), 1e-7)
        # Relative errors count: a step of decode rows is as important as a prefill of 512 tokens. Their absolute values
        # are minimised, not their squares, by weighing each step with its error in the round before: steps that shared
        # their time with other work would draw a mean away from the usual time.
        predicted, weights = seconds, np.ones(len(steps))
        coefficients = np.zeros(5)
        for _ in range(_ROUNDS):
            scale = weights / predicted
            coefficients = _nonnegative(features * scale[:, None], seconds * scale)
            predicted = np.maximum(features @ coefficients, 1e-7)
            weights = 1 / np.sqrt(np.maximum(np.abs(seconds / predicted - 1), _SURE))
        return cls(*coefficients.tolist())

    def spread(self, steps: Sequence[tuple[StepWork, float]], points: int = 100) -> tuple[float, ...]:
        """Return quantiles, in order, of the measured times of steps over the times that this cost gives."""
        ratios = [seconds / max(self.seconds(work), 1e-7) for work, seconds in steps]
        return tuple(np.quantile(ratios, (np.arange(points) + 0.5) / points).tolist())


def _nonnegative(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return least squares without negative coefficients; these are left out, the most negative first."""
    columns = list(range(matrix.shape[1]))
    while True:
        solution = np.linalg.lstsq(matrix[:, columns], values, rcond=None)[0]
        if not len(solution) or solution.min() >= 0:
            result = np.zeros(matrix.shape[1])
            result[columns] = solution
            return result
        del columns[int(solution.argmin())]


class StepTimes:
    """An observer of a session: the work of its steps, and the seconds from the step before to each.

    The host's work between two steps is included. A step that had to wait for requests counts with its device time
    alone.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps: list[tuple[StepWork, float]] = []
        self._clock = clock
        self._last: tuple[float, frozenset[str]] = (0.0, frozenset())

    def __call__(self, result: StepResult) -> None:
        now, requests = self._clock(), frozenset(row.request.id for row in result.plan.rows)
        at, before = self._last
        continued = not before.isdisjoint(requests)
        self.steps.append((StepWork.of(result.plan), now - at if continued else result.device_seconds))
        self._last = now, requests
