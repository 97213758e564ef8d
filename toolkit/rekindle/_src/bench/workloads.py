"""The workloads: coroutines that run over an open session and return figures. Greedy; the end of sequence is ignored.

W1 one stream, 128 prompt and 128 new tokens        W4 16 requests that share a prefix of 1,024 tokens
W2 a prompt of 1,024 tokens                         W6 decoding at a context of 8k
W3 32 requests at once, prompts 32–256              W7 Poisson arrivals at a share of capacity, with a prefill flood
W5 and W8, which need new processes, are in `fresh`.
Prompts are random token ids with a fixed seed, and the prefix cache is emptied before each run that should be cold.
`idle_share` is the share of the time, from submission to end, during which no step was on the device.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np

if TYPE_CHECKING:
    from rekindle._src.session.session import Session

Figures = dict[str, float]
Prompt = list[int]

SHARED = 1024  # tokens of W4's prefix
LONG = 8064


class Prompts:
    """Random prompts; every call returns a new one."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size

    def __call__(self, length: int) -> Prompt:
        return [int(token) for token in self._random.integers(3, self._vocab_size, length)]

    def lengths(self, low: int, high: int, count: int) -> list[int]:
        return [int(length) for length in self._random.integers(low, high + 1, count)]

    def waits(self, mean: float, count: int) -> list[float]:
        return [float(wait) for wait in self._random.exponential(mean, count)]


class Idleness:
    """Measures the share of time since its creation in which the device was idle."""

    def __init__(self, session: Session) -> None:
        self._session, self._start, self._busy = session, time.perf_counter(), session.stats().device_seconds

    @property
    def share(self) -> float:
        """The idle share of the time until now."""
        seconds = time.perf_counter() - self._start
        return max(0.0, 1 - (self._session.stats().device_seconds - self._busy) / seconds)


async def single_stream(session: Session, prompts: Prompts) -> Figures:
    """Run W1: one stream."""
    await session.cache.clear(tier="memory")
    device = Idleness(session)
    completion = await session.generate(prompts(128), max_tokens=128, ignore_eos=True)
    idle = device.share
    return {
        "ttft_ms": completion.timings.first_token * 1e3,
        "decode_tok_s": completion.timings.decode_rate(128),
        "idle_share": idle,
    }


async def prefill(session: Session, prompts: Prompts) -> Figures:
    """Run W2: one long prompt."""
    await session.cache.clear(tier="memory")
    length = _beside(session, 1, SHARED)
    completion = await session.generate(prompts(length), max_tokens=1, ignore_eos=True)
    return {"prefill_tok_s": length / completion.timings.first_token}


async def batch(session: Session, prompts: Prompts) -> Figures:
    """Run W3: 32 requests at once."""
    await session.cache.clear(tier="memory")
    inputs = [prompts(length) for length in prompts.lengths(32, 256, 32)]
    device = Idleness(session)
    return {**await together(session, inputs, prompts.lengths(32, 96, 32)), "idle_share": device.share}


async def shared_prefix(session: Session, prompts: Prompts) -> Figures:
    """Run W4: all requests at once with a cold cache, then with the prefix sent first; the time includes that."""
    prefix = prompts(_beside(session, 32 + 32, SHARED))
    await session.cache.clear(tier="memory")
    cold = await together(session, [prefix + prompts(32) for _ in range(16)], [32] * 16)
    await session.cache.clear(tier="memory")
    start = time.perf_counter()
    await session.generate(prefix, max_tokens=1, ignore_eos=True)
    primed = await together(session, [prefix + prompts(32) for _ in range(16)], [32] * 16)
    return {
        "cold_wall_s": cold["wall_s"],
        "primed_wall_s": time.perf_counter() - start,
        "cold_ttft_p50_ms": cold["ttft_p50_ms"],
        "primed_ttft_p50_ms": primed["ttft_p50_ms"],
    }


def _beside(session: Session, others: int, tokens: int) -> int:
    """Return how many of these `tokens` fit into the context beside others; the tiny model's is that short."""
    return min(tokens, (session.config.max_model_len or tokens + others) - others)


async def long_context(session: Session, prompts: Prompts) -> Figures:
    """Run W6: decoding with a long context."""
    await session.cache.clear(tier="memory")
    completion = await session.generate(prompts(LONG), max_tokens=64, ignore_eos=True)
    return {"prefill_tok_s": LONG / completion.timings.first_token, "decode_tok_s": completion.timings.decode_rate(64)}


async def arrivals(session: Session, prompts: Prompts) -> Figures:
    """Run W7: requests of 128 + 64 tokens at 50, 80 and 95 % of the capacity that a closed batch reaches."""
    await session.cache.clear(tier="memory")
    count = 48
    closed = await together(session, [prompts(128) for _ in range(count)], [64] * count)
    figures: Figures = {"capacity_req_s": count / closed["wall_s"]}
    for share in (50, 80, 95):
        await session.cache.clear(tier="memory")
        waits = prompts.waits(closed["wall_s"] / count / (share / 100), count)
        open_ = await together(session, [prompts(128) for _ in range(count)], [64] * count, waits, prompts(4 * SHARED))
        figures |= {f"{name}_at_{share}": open_[name] for name in ("ttft_p99_ms", "gap_p99_ms")}
    return figures


async def together(
    session: Session,
    inputs: Sequence[Prompt],
    outputs: Sequence[int],
    waits: Sequence[float] | None = None,
    flood: Prompt | None = None,
) -> Figures:
    """Send and stream every request; `waits` spaces their starts, `flood` is a long prompt in the middle."""
    firsts: list[float] = []
    gaps: list[float] = []
    tokens = 0
    capacity = session.config.max_model_len or SHARED

    async def stream_one(prompt: Prompt, length: int) -> None:
        nonlocal tokens
        start = last = time.perf_counter()
        received = 0
        async for delta in session.stream(prompt, max_tokens=length, ignore_eos=True):
            now = time.perf_counter()
            if not delta.token_ids:
                continue
            firsts.append(now - start) if not received else gaps.append((now - last) / len(delta.token_ids))
            received, last = received + len(delta.token_ids), now
        tokens += received

    start = time.perf_counter()
    async with anyio.create_task_group() as group:
        for index, (prompt, length) in enumerate(zip(inputs, outputs, strict=True)):
            if waits is not None:
                await anyio.sleep(waits[index])
            group.start_soon(stream_one, prompt, length)
            if flood is not None and index == len(inputs) // 2:
                group.start_soon(stream_one, flood[: capacity - 1], 1)
    wall = time.perf_counter() - start
    return {
        "wall_s": wall,
        "generated_tok_s": tokens / wall,
        "ttft_p50_ms": percentile(firsts, 50) * 1e3,
        "ttft_p99_ms": percentile(firsts, 99) * 1e3,
        "ttft_max_ms": max(firsts, default=0.0) * 1e3,
        "gap_p50_ms": percentile(gaps, 50) * 1e3,
        "gap_p99_ms": percentile(gaps, 99) * 1e3,
    }


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else 0.0


Workload = Callable[["Session", Prompts], Awaitable[Figures]]
WORKLOADS: dict[str, Workload] = {
    "W1": single_stream,
    "W2": prefill,
    "W3": batch,
    "W4": shared_prefix,
    "W6": long_context,
    "W7": arrivals,
}
FRESH = ("W5", "W8")  # workloads that run in new processes
BROKEN_DOWN = ("W1", "W2", "W3")  # workloads that have a breakdown
LENGTHS = {"W4": 2 * SHARED, "W6": 8192}  # the max_model_len a workload needs beyond MODEL_LEN
MODEL_LEN = 2048
REQUESTS = {"W3": 32, "W4": 16, "W7": 16}  # requests that run at once


async def whole_programs(session: Session) -> None:
    """Run every further step in a program compiled as a whole, as all steps do some seconds later anyway."""
    from rekindle._src.session.session import client_of  # with JAX, which the workloads do without

    runner: Any = client_of(session).engine.runner  # or a RecordingRunner
    await anyio.to_thread.run_sync(runner.programs.replace_parts)
