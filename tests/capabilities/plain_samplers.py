"""llama.cpp's samplers in plain numpy, one row and one token after the other, as its `llama-sampler.cpp` has them.

Candidates are pairs of token and logit, and a sampler returns the remaining ones. As in llama.cpp, tokens with a logit
of minus infinity count in `size` until a sampler drops them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rekindle._src.core.sampling import Sampling

Candidates = list[tuple[int, float]]


def softmax(candidates: Candidates) -> np.ndarray:
    logits = np.array([logit for _, logit in candidates], np.float64)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _sorted(candidates: Candidates) -> Candidates:
    return sorted(candidates, key=lambda pair: -pair[1])


def top_n_sigma(candidates: Candidates, sigmas: float) -> Candidates:
    finite = np.array([logit for _, logit in candidates if logit != -math.inf])
    floor = finite.max() - sigmas * finite.std()
    return [(token, logit if logit >= floor else -math.inf) for token, logit in candidates]


def top_k(candidates: Candidates, k: int) -> Candidates:
    return _sorted(candidates)[:k]


def typical(candidates: Candidates, share: float) -> Candidates:
    candidates = [pair for pair in _sorted(candidates) if pair[1] != -math.inf]  # llama.cpp's entropy would be NaN
    p = softmax(candidates)
    surprise = -np.log(p)
    order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
    total, kept = 0.0, []
    for index in order:
        total += p[index]
        kept.append(candidates[index])
        if total > share:
            break
    return kept


def top_p(candidates: Candidates, share: float) -> Candidates:
    candidates = _sorted(candidates)
    total = 0.0
    for index, p in enumerate(softmax(candidates)):
        total += p
        if total >= share:
            return candidates[: index + 1]
    return candidates


def min_p(candidates: Candidates, share: float) -> Candidates:
    floor = max(logit for _, logit in candidates) + math.log(share)
    return [pair for pair in candidates if pair[1] >= floor]


def xtc(candidates: Candidates, threshold: float) -> Candidates:
    """The candidates that are left where it acts."""
    candidates = _sorted(candidates)
    above = int((softmax(candidates) >= threshold).sum())
    return candidates[above - 1 :] if above > 1 else candidates


def temperature(candidates: Candidates, value: float, reach: float = 0.0, exponent: float = 1.0) -> Candidates:
    if reach > 0.0:
        if len(candidates) <= 1:
            return candidates
        p = softmax(candidates)
        entropy = -sum(x * math.log(x) for x in p if x > 0.0)
        low, high = max(0.0, value - reach), value + reach
        value = low + (high - low) * (entropy / math.log(len(candidates))) ** exponent
    if value <= 0.0:
        best = max(candidates, key=lambda pair: pair[1])[0]
        return [(token, logit if token == best else -math.inf) for token, logit in candidates]
    return [(token, logit / value) for token, logit in candidates]


def mirostat(candidates: Candidates, limit: float) -> Candidates:
    candidates = _sorted(candidates)
    kept = [pair for pair, p in zip(candidates, softmax(candidates), strict=True) if p > 0 and -math.log2(p) <= limit]
    return kept or candidates[:1]


def adaptive(candidates: Candidates, target: float, sums: float, weights: float) -> Candidates:
    aim = min(max(2.0 * target - sums / weights, 0.0), 1.0)
    result = []
    for (token, logit), p in zip(candidates, softmax(candidates), strict=True):
        distance = abs(p - aim) / 0.3
        result.append((token, logit if logit == -math.inf else 5.0 - 10.0 * distance**2 / (1.0 + distance)))
    return result


def dry(
    text: Sequence[int], sampling: Sampling, breakers: Mapping[int, Sequence[tuple[int, ...]]] | None = None
) -> dict[int, float]:
    """The penalty of each token after a text; `breakers` has the rests of breakers by the tokens that begin them."""
    breakers, allowed = breakers or {}, sampling.dry_allowed_length
    last_n = len(text) if sampling.dry_penalty_last_n < 0 else sampling.dry_penalty_last_n
    newest = [int(token) for token in text[::-1][:last_n]]
    length = len(newest)
    if length <= allowed:
        return {}
    limit = length
    for place, token in enumerate(newest):
        rests = [len(rest) for rest in breakers.get(token, ()) if len(rest) <= place
                 and all(rest[at] == newest[place - at - 1] for at in range(len(rest)))]  # fmt: skip
        if rests:
            limit = place - max(rests)
            break
    if limit < allowed:
        return {}
    longest: dict[int, int] = {}
    for distance in range(1, length):
        match = 0
        while match + distance < length and newest[match] == newest[match + distance]:
            match += 1
        match = min(match, limit)
        if match >= allowed:
            token = newest[distance - 1]
            longest[token] = max(longest.get(token, -1), match)
    most = int(88.7228391 / math.log(sampling.dry_base)) if sampling.dry_base > 1.000001 else 0
    return {
        token: sampling.dry_multiplier * sampling.dry_base ** (min(match - allowed, most) if most else match - allowed)
        for token, match in longest.items()
        if () not in breakers.get(token, ())
    }


def chain(logits: np.ndarray, sampling: Sampling, *, acts: bool = False, text: Sequence[int] = ()) -> np.ndarray:
    """The distribution [V] after a request's samplers, before mirostat or adaptive_p; XTC `acts` or not."""
    candidates: Candidates = [(token, float(logit)) for token, logit in enumerate(logits)]
    for name in sampling.order:
        match name:
            case "dry":
                taken = dry(text, sampling)
                candidates = [(token, logit - taken.get(token, 0.0)) for token, logit in candidates]
            case "top_n_sigma":
                candidates = top_n_sigma(candidates, sampling.top_n_sigma)
            case "top_k":
                candidates = top_k(candidates, sampling.top_k)
            case "typical_p":
                candidates = typical(candidates, sampling.typical_p)
            case "top_p":
                candidates = top_p(candidates, sampling.top_p)
            case "min_p":
                candidates = min_p(candidates, sampling.min_p)
            case "xtc":
                candidates = xtc(candidates, sampling.xtc_threshold) if acts else candidates
            case "temperature":
                reach, exponent = sampling.dynatemp_range, sampling.dynatemp_exponent
                candidates = temperature(candidates, sampling.temperature, reach, exponent)
    return distribution(candidates, len(logits))


def distribution(candidates: Candidates, vocab_size: int) -> np.ndarray:
    """The probabilities [V] of candidates."""
    result = np.zeros(vocab_size)
    for (token, _), p in zip(candidates, softmax(candidates), strict=True):
        result[token] = p
    return result
