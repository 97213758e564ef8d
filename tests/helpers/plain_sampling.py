"""Every sampling option in plain numpy, one row at a time and with a sort: what the device code is compared with."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from rekindle._src.core.sampling import Sampling


def shaped(
    logits: np.ndarray, sampling: Sampling, prompt: Sequence[int], output: Sequence[int], ends: Collection[int] = ()
) -> np.ndarray:
    """Logits after bias, penalties and the min_tokens mask."""
    logits = np.asarray(logits, np.float64).copy()
    for token, bias in sampling.logit_bias.items():
        logits[token] += np.clip(bias, -1e9, 1e9)
    for token in {*prompt, *output}:
        rate = sampling.repetition_penalty
        logits[token] = logits[token] / rate if logits[token] > 0 else logits[token] * rate
    for token in set(output):
        logits[token] -= sampling.frequency_penalty * list(output).count(token) + sampling.presence_penalty
    if len(output) < sampling.min_tokens:
        logits[list(ends)] = -np.inf
    return logits


def distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p; one-hot when greedy."""
    if sampling.greedy:
        return np.eye(len(logits))[int(np.argmax(logits))]
    scaled = np.asarray(logits, np.float64) / sampling.temperature
    keep = np.ones(len(logits), bool)
    if 0 < sampling.top_k < len(logits):
        keep &= scaled >= np.sort(scaled)[-sampling.top_k]
    weights = np.where(keep, np.exp(scaled - scaled.max()), 0.0)
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")
    above = np.cumsum(weights[order]) - weights[order]
    keep[order] &= above < sampling.top_p
    keep &= weights >= sampling.min_p * weights.max()
    weights = np.where(keep, weights, 0.0)
    return weights / weights.sum()
