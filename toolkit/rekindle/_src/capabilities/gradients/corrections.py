"""The corrections of AtP* for saturated attention: the softmax is computed again with a patched query or key.

The formulas are those of "AtP*: An efficient and scalable method for localizing LLM behaviour to components"
(arXiv 2403.00745), section 3.1. The derivative by a weight of attention is that of the head's output times the value.

Axes: T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.capabilities.captures.tapped import AttentionFacts

FloatArray = NDArray[np.float32]


_EXPONENT = 700.0  # of an exponent: beyond it, float64 is infinite


class HeadArrays(NamedTuple):
    """A layer's queries [T, H, D], keys and values [T, K, D], and the derivative [T, H, D] by the heads' outputs."""

    q: FloatArray
    k: FloatArray
    v: FloatArray
    gradient: FloatArray


def corrected(base: HeadArrays, source: Mapping[str, FloatArray], spec: AttentionFacts) -> dict[str, FloatArray]:
    """Return the scores of queries "q" [T, H] and keys "k" [T, K] of the source in the place of the prompt's."""
    group = base.q.shape[1] // base.k.shape[1]
    k, v, other_k = (np.repeat(each, group, axis=1) for each in (base.k, base.v, source["k"]))
    logits, patched = (_logits(q, keys, spec) for q, keys in ((base.q, k), (source["q"], k)))
    weights, rewards = _softmax(logits), np.einsum("thd,shd->hts", base.gradient, v, dtype=np.float64)
    queries = np.einsum("hts,hts->th", _softmax(patched) - weights, rewards)
    return {"q": queries.astype(np.float32), "k": _keys(logits, _logits(base.q, other_k, spec), rewards, group)}


def _keys(
    logits: NDArray[np.float64], patched: NDArray[np.float64], rewards: NDArray[np.float64], group: int
) -> FloatArray:
    """Return the scores of keys: one key's logits are replaced at a time, in the rows of all later queries."""
    weights = _softmax(logits)
    seen = np.isfinite(logits)
    # With one logit raised by d, its weight w becomes w·e^d / z and each other one's is divided by z, the sum of the
    # other weights and w·e^d. The others are added up, since 1 − w is 0 where attention is saturated.
    factor = np.exp(np.minimum(np.subtract(patched, logits, out=np.zeros_like(logits), where=seen), _EXPONENT))
    mean = (weights * rewards).sum(axis=-1, keepdims=True)
    own = weights * factor
    total = _others(weights) + own
    weighed = _others(weights * rewards) + own * rewards
    changes = np.divide(weighed, total, out=np.broadcast_to(mean, total.shape).copy(), where=total > 0.0) - mean
    by_head = np.where(seen, changes, 0.0).sum(axis=1)  # [H, T]
    return by_head.reshape(-1, group, by_head.shape[-1]).sum(axis=1).T.astype(np.float32)


def _others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of all other values along the last axis, without a subtraction."""
    zero = np.zeros_like(values[..., :1])
    before = np.concatenate([zero, values[..., :-1].cumsum(axis=-1)], axis=-1)
    after = np.concatenate([values[..., :0:-1].cumsum(axis=-1)[..., ::-1], zero], axis=-1)
    return before + after


def _logits(q: FloatArray, k: FloatArray, spec: AttentionFacts) -> NDArray[np.float64]:
    logits = np.einsum("thd,shd->hts", q, k, dtype=np.float64) * spec.scale
    if spec.soft_cap is not None:
        logits = np.tanh(logits / spec.soft_cap) * spec.soft_cap
    place = np.arange(len(q))
    distance = place[:, None] - place
    return np.where((distance >= 0) & (distance < (spec.sliding_window or len(q))), logits, -np.inf)


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
