"""The workloads as batches of token prompts, and the figures that answers to them give.

W1 one stream, 128 prompt and 128 new tokens        W4 16 requests that share a prefix of 1,024 tokens, all at once
W2 a prompt of 1,024 tokens                            on a cold cache; then with the prefix sent first, counted
W3 32 requests at once, prompts 32–256              W5 a fresh process, to its first token
W7 requests that come one by one                    W8 W4 again, in a fresh process that restores its caches
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from engine import Answer, Prompt

Figures = dict[str, float]
SHARED = 1024
SHARES = (50, 80, 95)  # per cent of capacity at which W7's requests come


@dataclasses.dataclass(frozen=True)
class Batch:
    prompts: list[Prompt]
    outputs: list[int]
    keep: bool = False
    at: list[float] | None = None  # seconds until each comes; all at once if None


@dataclasses.dataclass(frozen=True)
class Plan:
    """One measurement: batches sent one after the other to an engine with nothing cached."""

    batches: list[Batch]
    figures: Callable[[Sequence[Batch], Sequence[Answer]], Figures]


class Draw:
    """Random prompts of one round, the same for every engine and new in every round."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size

    def prompt(self, length: int) -> Prompt:
        return self._random.integers(3, self._vocab_size, length).tolist()

    def lengths(self, low: int, high: int, count: int) -> list[int]:
        return self._random.integers(low, high + 1, count).tolist()

    def moments(self, count: int, span: float) -> list[float]:
        """When `count` arrivals come, given that a Poisson process had so many of them in `span` seconds."""
        return sorted(self._random.uniform(0, span, count).tolist())


def single_stream(draw: Draw) -> Plan:
    return Plan([Batch([draw.prompt(128)], [128])], stream_figures)


def stream_figures(batches: Sequence[Batch], answers: Sequence[Answer]) -> Figures:
    times = answers[0].times[0]
    return {"ttft_ms": times[0] * 1e3, "decode_tok_s": (len(times) - 1) / (times[-1] - times[0])}


def prefill(draw: Draw) -> Plan:
    return Plan([Batch([draw.prompt(1024)], [1])], lambda batches, answers: {"prefill_tok_s": 1024 / answers[0].wall})


def many(draw: Draw) -> Plan:
    lengths = np.random.default_rng(0)  # the same amount of work in every round
    prompts = [draw.prompt(length) for length in lengths.integers(32, 257, 32)]
    return Plan([Batch(prompts, lengths.integers(32, 97, 32).tolist())], batch_figures)


def batch_figures(batches: Sequence[Batch], answers: Sequence[Answer]) -> Figures:
    answer = answers[-1]
    figures = {"wall_s": answer.wall, "generated_tok_s": sum(batches[-1].outputs) / answer.wall}
    if all(answer.times):
        firsts = [times[0] * 1e3 for times in answer.times]
        gaps = [1e3 * gap for times in answer.times for gap in between(times)]
        for name, values in (("ttft", firsts), ("gap", gaps)):
            figures |= {f"{name}_p{share}_ms": float(np.percentile(values, share)) for share in (50, 99)}
    return figures


def between(times: Sequence[float]) -> list[float]:
    """The wait for each token after the first; tokens that came together share theirs."""
    arrivals = [(at, len(list(same))) for at, same in itertools.groupby(times)]
    return [
        (later - before) / count for (before, _), (later, count) in itertools.pairwise(arrivals) for _ in range(count)
    ]


def shared(draw: Draw) -> Plan:
    prefix = draw.prompt(SHARED)
    return Plan([Batch([prefix + draw.prompt(32) for _ in range(16)], [32] * 16)], batch_figures)


def primed(draw: Draw) -> Plan:
    prefix = draw.prompt(SHARED)
    batches = [Batch([prefix], [1], keep=True), Batch([prefix + draw.prompt(32) for _ in range(16)], [32] * 16)]

    def figures(batches: Sequence[Batch], answers: Sequence[Answer]) -> Figures:
        """With the prefix counted."""
        return batch_figures(batches, answers) | {
            "wall_s": sum(answer.wall for answer in answers),
            "generated_tok_s": sum(batches[1].outputs) / sum(answer.wall for answer in answers),
        }

    return Plan(batches, figures)


# W7: 32 requests that come one by one, and a long prompt in the middle of them. Every engine gets the same arrivals,
# so that latencies are compared under one load: a share of the slowest engine's capacity, which is how many requests a
# second it finishes when all of them arrive at once. No engine's queue grows without bound then.
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
        "ttft_p50_ms": float(np.percentile(firsts, 50)), "ttft_p99_ms": float(np.percentile(firsts, 99)),
        "gap_p99_ms": float(np.percentile(gaps, 99)), "gap_max_ms": max(gaps), "flood_ttft_ms": flood,
    }  # fmt: skip


PLANS: dict[str, Callable[[Draw], Plan]] = {
    "W1": single_stream, "W2": prefill, "W3": many, "W4": shared, "W4 primed": primed,
}  # fmt: skip
ARRIVING = "W7"  # whose plan needs to know what the engines can do
PROCESSES = ("W5", "W8")  # each measurement is a process of its own
WORKLOADS = (*PLANS, ARRIVING, *PROCESSES)

# What a row of the table compares: higher is better for rates, lower for times.
COMPARED = {
    "W1": ("decode_tok_s", "ttft_ms"),
    "W2": ("prefill_tok_s",),
    "W3": ("generated_tok_s", "wall_s", "ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms"),
    "W4": ("wall_s", "ttft_p50_ms"),
    "W4 primed": ("wall_s",),
    "W7": tuple(
        f"{figure}_at_{share}"
        for share in SHARES
        for figure in ("ttft_p50_ms", "ttft_p99_ms", "gap_p99_ms", "gap_max_ms", "flood_ttft_ms")
    ),
    "W5": ("cold_s", "warm_s", "cold_peak_mb", "warm_peak_mb", "cold_resident_mb", "warm_resident_mb"),
    "W8": ("cold_prefill_s", "restored_prefill_s", "restored_share"),
}


def better(figure: str, ours: float, theirs: float) -> float:
    """By what factor `ours` is the better one: 2.0 is twice as fast, whichever way the figure counts."""
    if not ours or not theirs:
        return float("nan")
    return ours / theirs if figure.endswith("tok_s") else theirs / ours


def medians(rounds: Sequence[Figures]) -> Figures:
    """Return the median of each figure over the rounds that have it."""
    names = dict.fromkeys(name for figures in rounds for name in figures)
    return {name: statistics.median(figures[name] for figures in rounds if name in figures) for name in names}


def ratio(figure: str, ours: Sequence[Figures], theirs: Sequence[Figures]) -> float:
    """The median of the rounds' own ratios: both sides of each were measured within the same minute."""
    both = [pair for pair in zip(ours, theirs, strict=False) if all(figure in one for one in pair)]
    ratios = [better(figure, one[figure], other[figure]) for one, other in both]
    return statistics.median(ratios) if ratios else float("nan")
