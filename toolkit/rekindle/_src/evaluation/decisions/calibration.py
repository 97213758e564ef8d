"""Calibration: a few labelled rows say how far the probabilities of a question's options can be believed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.drawable import Record

Floats = NDArray[np.float64]
SATURATED = 1e-4  # a model that leaves less than this to all other options is sure of an answer, right or wrong
_PRIOR = 1.0  # the strength, in rows, with which a fit stays at the model's own probabilities
_STEPS = 100


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Calibration(Record):
    """The correction of one question's probabilities: log-probabilities are scaled, and each option is shifted."""

    rows: int  # that were labelled
    scale: float  # below 1, the model is too sure
    shifts: tuple[float, ...]  # of the options, in their order; together 0
    loss_before: float  # the mean of -log(probability of the right option), in nats
    loss_after: float
    accuracy_before: float  # the share of rows with the right option first
    accuracy_after: float
    saturated: float  # the share of rows of which the model is sure; a scale can hardly change their order

    def apply(self, logprobs: Sequence[float]) -> Floats:
        """Return the probabilities of options with these log-probabilities."""
        return probabilities(self.scale * centred(logprobs) + np.asarray(self.shifts))


def centred(logprobs: Sequence[float]) -> Floats:
    """Return log-probabilities relative to the largest."""
    values = np.asarray(logprobs, np.float64)
    return values - values.max()


def probabilities(scores: Floats) -> Floats:
    """Return the softmax of scores along the last axis."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def fit(logprobs: Sequence[Sequence[float]], right: Sequence[int]) -> Calibration:
    """Fit a scale and shifts to rows of log-probabilities and the place of each row's right option.

    A scale is never negative: where a model is wrong more often than right, only shifts are left.
    """
    rows, places = np.stack([centred(row) for row in logprobs]), np.asarray(right)
    values = _newton(rows, places, 1.0)
    if values[0] < 0.0:
        values = _newton(0.0 * rows, places, 0.0)
    before, after = probabilities(rows), probabilities(values[0] * rows + values[1:])
    sure = 1.0 - before.max(axis=1) < SATURATED
    return Calibration(
        rows=len(rows),
        scale=float(values[0]),
        shifts=tuple((values[1:] - values[1:].mean()).tolist()),
        loss_before=_loss(before, places),
        loss_after=_loss(after, places),
        accuracy_before=float((before.argmax(axis=1) == places).mean()),
        accuracy_after=float((after.argmax(axis=1) == places).mean()),
        saturated=float(sure.mean()),
    )


def _newton(rows: Floats, places: NDArray[np.intp], scale: float) -> Floats:
    """Return the scale and the shifts with the least loss, which is convex: Newton's steps, halved if too long.

    A prior at `scale` and shifts of 0 keeps few rows from moving far.
    """
    options = rows.shape[1]
    given, start = np.eye(options)[places], np.concatenate([[scale], np.zeros(options)])

    def loss(values: Floats) -> float:
        chosen = probabilities(values[0] * rows + values[1:])[np.arange(len(rows)), places]
        return float(-np.log(np.maximum(chosen, 1e-300)).sum() + _PRIOR / 2 * ((values - start) ** 2).sum())

    values, best = start, loss(start)
    for _ in range(_STEPS):
        shares = probabilities(values[0] * rows + values[1:])
        means = (rows * shares).sum(axis=1)
        gradient = np.concatenate([[(rows * (shares - given)).sum()], (shares - given).sum(axis=0)])
        hessian = np.empty((options + 1, options + 1))
        hessian[0, 0] = (rows**2 * shares).sum() - (means**2).sum()
        hessian[0, 1:] = hessian[1:, 0] = (shares * (rows - means[:, None])).sum(axis=0)
        hessian[1:, 1:] = np.diag(shares.sum(axis=0)) - shares.T @ shares
        gradient += _PRIOR * (values - start)
        step = np.linalg.solve(hessian + _PRIOR * np.eye(options + 1), gradient)
        size = 1.0
        while size > 1e-8 and loss(values - size * step) > best:
            size /= 2
        moved = values - size * step
        if best - loss(moved) < 1e-9:
            break
        values, best = moved, loss(moved)
    return values


def _loss(shares: Floats, places: NDArray[np.intp]) -> float:
    return float(-np.log(np.maximum(shares[np.arange(len(places)), places], 1e-300)).mean())
