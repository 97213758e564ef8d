"""Losses on the host: of tokens' log-probabilities, a value and the weight of each token in the gradient.

A weight is the derivative of the loss by the token's log-probability, with its sign changed: the backward pass is that
of −Σ weight · log-probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_MOST_APART = 20.0  # of two log-probabilities, so that their ratio stays a number


class LossPart(NamedTuple):
    """A part of a step's loss, and the weights of each line's tokens."""

    value: float
    weights: list[Floats]


class Loss(Protocol):
    """A loss of a step: the sum over its micro-batches."""

    @property
    def ahead(self) -> bool:
        """True if weights don't depend on log-probabilities, so that they are known before the pass."""
        ...

    def weigh(self, lines: Sequence[int], logprobs: Sequence[Floats]) -> LossPart:
        """Return the part of these lines of the step, given the log-probabilities of their learned tokens."""
        ...


class NextToken:
    """The mean of the negative log-probabilities of all learned tokens of a step."""

    ahead = True

    def __init__(self, counts: Sequence[int]) -> None:
        """`counts` are the learned tokens of all lines."""
        self._total = max(1, sum(counts))

    def weigh(self, lines: Sequence[int], logprobs: Sequence[Floats]) -> LossPart:
        weights = [np.full(len(one), 1.0 / self._total) for one in logprobs]
        return LossPart(-sum(float(one.sum()) for one in logprobs) / self._total, weights)


class Preference:
    """DPO's and IPO's loss of pairs: lines 2i and 2i + 1 are the chosen and the rejected completion of a prompt.

    DPO: −log σ(β · [(π_c − ref_c) − (π_r − ref_r)]) of log-probabilities summed over a completion. IPO: the square of
    the same difference of their means, less 1 / (2 β).
    """

    ahead = False

    def __init__(self, references: Sequence[Floats], beta: float, *, means: bool) -> None:
        """`references` are the log-probabilities of each line's learned tokens by the model without the adapter."""
        self._references, self._beta, self._means = references, beta, means
        self.margins: list[float] = []  # of the pairs weighed so far: chosen minus rejected

    def weigh(self, lines: Sequence[int], logprobs: Sequence[Floats]) -> LossPart:
        pairs, value = len(self._references) // 2, 0.0
        weights: list[Floats] = []
        for place in range(0, len(lines), 2):
            own, sizes = [], []
            for line, one in zip(lines[place : place + 2], logprobs[place : place + 2], strict=True):
                size = max(1, len(one)) if self._means else 1
                own.append(float((one - self._references[line]).sum()) / size)
                sizes.append((len(one), size))
            margin = own[0] - own[1]
            self.margins.append(margin)
            if self._means:
                value += (margin - 1 / (2 * self._beta)) ** 2 / pairs
                slope = -2 * (margin - 1 / (2 * self._beta)) / pairs
            else:
                value += float(np.logaddexp(0.0, -self._beta * margin)) / pairs
                slope = self._beta / (1.0 + float(np.exp(min(700.0, self._beta * margin)))) / pairs
            for sign, (count, size) in zip((1.0, -1.0), sizes, strict=True):
                weights.append(np.full(count, sign * slope / size))
        return LossPart(value, weights)


class Policy:
    """GRPO's clipped loss of completions, with its variants.

    A token's loss is −min(ratio · A, clip(ratio, 1 − ε, 1 + ε) · A) + β · k3, with the ratio of its probability to that
    of the policy that drew it, and k3 = e^(ref − π) − (ref − π) − 1. "dapo" divides the sum by the tokens of the step,
    "grpo" averages over each completion and then over all, and "dr_grpo" divides by completions times the most tokens.
    """

    ahead = False

    def __init__(
        self,
        advantages: Sequence[float],
        drawn: Sequence[Floats],
        references: Sequence[Floats] | None,
        *,
        variant: str,
        beta: float,
        clip: float,
        most: int,
    ) -> None:
        """`drawn` are the log-probabilities that each completion's tokens were drawn with; it has `most` at most."""
        counts = [len(one) for one in drawn]
        total, lines = max(1, sum(counts)), max(1, len(counts))
        self._divisors = {
            "dapo": [total] * lines,
            "grpo": [lines * max(1, count) for count in counts],
            "dr_grpo": [lines * most] * lines,
        }[variant]
        self._advantages, self._drawn, self._references = advantages, drawn, references
        self._beta, self._clip = beta, clip
        self.apart = 0.0  # the largest difference of a log-probability from the one it was drawn with

    def weigh(self, lines: Sequence[int], logprobs: Sequence[Floats]) -> LossPart:
        value = 0.0
        weights: list[Floats] = []
        for line, own in zip(lines, logprobs, strict=True):
            advantage, divisor = self._advantages[line], self._divisors[line]
            self.apart = max(self.apart, float(np.abs(own - self._drawn[line]).max(initial=0.0)))
            ratio = np.exp(np.minimum(own - self._drawn[line], _MOST_APART))
            clipped = np.clip(ratio, 1 - self._clip, 1 + self._clip)
            gain = np.minimum(ratio * advantage, clipped * advantage)
            value -= float(gain.sum()) / divisor
            weight = np.where(ratio * advantage <= clipped * advantage, ratio * advantage, 0.0) / divisor
            if self._references is not None:
                away = np.minimum(self._references[line] - own, _MOST_APART)
                value += self._beta * float((np.exp(away) - away - 1).sum()) / divisor
                weight -= self._beta * (1 - np.exp(away)) / divisor
            weights.append(weight)
        return LossPart(value, weights)


def advantages_of(rewards: NDArray[np.float64], *, scaled: bool) -> NDArray[np.float64]:
    """Return rewards [prompts, completions] less each prompt's mean, divided by their deviation if `scaled`."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    if not scaled:
        return centred
    divided: NDArray[np.float64] = centred / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    return divided
