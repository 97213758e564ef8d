"""W7: 32 requests of 128 + 64 tokens that come one by one, and a prompt of 1,536 tokens in the middle of them.

Every engine gets the same arrivals, so that latencies are compared under one load. Its measure is the slowest engine's
capacity, the requests a second that it finishes when all are there at once: at shares of it nobody's queue grows
without bound. Of a faster engine's own capacity these shares are less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from engine import Answer
from plans import SHARES, Batch, Draw, Figures, Plan, between

COUNT = 32
PROMPT, NEW = 128, 64
FLOOD = 1536  # tokens of the prompt in the middle, which asks for one token


def capacity(draw: Draw) -> Plan:
    """Of one engine: a batch with the long prompt that warms up, then two closed ones, of which the better counts."""
    batches = [together(draw, [0.0] * COUNT), *(Batch(requests(draw), [NEW] * COUNT) for _ in range(2))]

    def figures(batches: Sequence[Batch], answers: Sequence[Answer]) -> Figures:
        return {"capacity_req_s": COUNT / min(answer.wall for answer in answers[1:])}

    return Plan(batches, figures)


def arrivals(draw: Draw, capacities: Mapping[str, float]) -> Plan:
    """A batch for each share of the slowest engine's capacity."""
    rates = [share / 100 * min(capacities.values()) for share in SHARES]

    def figures(batches: Sequence[Batch], answers: Sequence[Answer]) -> Figures:
        return {
            f"{name}_at_{share}": value
            for share, batch, answer in zip(SHARES, batches, answers, strict=True)
            for name, value in latencies(batch, answer).items()
        }

    return Plan([together(draw, draw.moments(COUNT, COUNT / rate)) for rate in rates], figures)


def requests(draw: Draw) -> list[list[int]]:
    return [draw.prompt(PROMPT) for _ in range(COUNT)]


def together(draw: Draw, at: list[float]) -> Batch:
    """The requests and, last in the batch, the long prompt, which comes with the one in the middle."""
    return Batch([*requests(draw), draw.prompt(FLOOD)], [NEW] * COUNT + [1], at=[*at, at[COUNT // 2]])


def latencies(batch: Batch, answer: Answer) -> Figures:
    """Of the requests, from when each came; the long prompt's own is apart, since p99 would show nothing else.

    Who computes that prompt in one piece stops everybody once: too few gaps for p99, so the longest is there as well.
    """
    assert batch.at is not None
    *firsts, flood = [1e3 * (times[0] - at) for times, at in zip(answer.times, batch.at, strict=True)]
    gaps = [1e3 * gap for times in answer.times for gap in between(times)]
    return {
        "ttft_p50_ms": float(np.percentile(firsts, 50)),
        "ttft_p99_ms": float(np.percentile(firsts, 99)),
        "gap_p99_ms": float(np.percentile(gaps, 99)),
        "gap_max_ms": max(gaps),
        "flood_ttft_ms": flood,
    }
