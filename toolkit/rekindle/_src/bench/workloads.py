"""The workloads: coroutines that run over an open session and return figures. Greedy; the end of sequence is ignored.

W1 one stream, 128 prompt and 128 new tokens        W4 16 requests that share a prefix of 1,024 tokens
W2 a prompt of 1,024 tokens                         W6 decoding at a context of 8k
W3 32 requests at once, prompts 32–256              W7 Poisson arrivals at a share of capacity, with a prefill flood
W5 the time of a new process to its first token     W8 a new process that restores the cache of the first one
Prompts are random token ids with a fixed seed, and the prefix cache is emptied before each run that should be cold.
`idle_share` is the share of the time, from submission to end, during which no step was on the device.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np

from rekindle._src.core.memory import gc_paused
from rekindle_kernels import system

if TYPE_CHECKING:
    from rekindle._src.session.session import Session

Figures = dict[str, float]
Prompt = list[int]

SHARED = 1024  # tokens of W4's prefix
LONG = 8064


class RandomPrompts:
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
    """Measures the share of time since its creation that the device was idle."""

    def __init__(self, session: Session) -> None:
        self._session, self._start, self._busy = session, time.perf_counter(), session.stats().device_seconds

    @property
    def share(self) -> float:
        seconds = time.perf_counter() - self._start
        return max(0.0, 1 - (self._session.stats().device_seconds - self._busy) / seconds)


async def single_stream(session: Session, prompts: RandomPrompts) -> Figures:
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


async def prefill(session: Session, prompts: RandomPrompts) -> Figures:
    """Run W2: one long prompt."""
    await session.cache.clear(tier="memory")
    length = _beside(session, 1, SHARED)
    completion = await session.generate(prompts(length), max_tokens=1, ignore_eos=True)
    return {"prefill_tok_s": length / completion.timings.first_token}


async def batch(session: Session, prompts: RandomPrompts) -> Figures:
    """Run W3: 32 requests at once."""
    await session.cache.clear(tier="memory")
    inputs = [prompts(length) for length in prompts.lengths(32, 256, 32)]
    device = Idleness(session)
    return {**await together(session, inputs, prompts.lengths(32, 96, 32)), "idle_share": device.share}


async def shared_prefix(session: Session, prompts: RandomPrompts) -> Figures:
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
    """Return how many of these `tokens` fit into the context along with `others`; the tiny model's is that short."""
    return min(tokens, (session.config.max_model_len or tokens + others) - others)


async def long_context(session: Session, prompts: RandomPrompts) -> Figures:
    """Run W6: decoding with a long context."""
    await session.cache.clear(tier="memory")
    completion = await session.generate(prompts(LONG), max_tokens=64, ignore_eos=True)
    return {"prefill_tok_s": LONG / completion.timings.first_token, "decode_tok_s": completion.timings.decode_rate(64)}


async def arrivals(session: Session, prompts: RandomPrompts) -> Figures:
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


Workload = Callable[["Session", RandomPrompts], Awaitable[Figures]]
WORKLOADS: dict[str, Workload] = {
    "W1": single_stream,
    "W2": prefill,
    "W3": batch,
    "W4": shared_prefix,
    "W6": long_context,
    "W7": arrivals,
}
FRESH = ("W5", "W8")  # workloads that run in new processes
LENGTHS = {"W4": 2 * SHARED, "W6": 8192}  # the max_model_len a workload needs beyond MODEL_LEN
MODEL_LEN = 2048
REQUESTS = {"W3": 32, "W4": 16, "W7": 16}  # requests that run at once


async def whole_programs(session: Session) -> None:
    """Run every further step in a program compiled as a whole, as all steps do some seconds later anyway."""
    from rekindle._src.session.session import client_of  # with JAX, which the workloads do without

    runner: Any = client_of(session).engine.runner  # or a RecordingRunner
    await anyio.to_thread.run_sync(runner.programs.replace_parts)


FIRST_PROMPT = 32
SNAPSHOT = "bench"
RESTART = {"max_model_len": 2048, "max_requests": 32, "precompile": "all"}


def first_token(model: str, options: Mapping[str, object]) -> Figures:
    """Run W5: seconds from a process's start to its first token, with an empty store and with the filled one."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as cache:
        for store in ("cold", "warm"):
            start = time.perf_counter()
            answer = _child({"do": "first", "model": model, "options": {**options, "cache_dir": cache}}, start)
            figures[f"{store}_s"] = answer["seconds"]
            figures[f"{store}_peak_mb"] = answer["peak_bytes"] / 1e6
    return figures


def restart(model: str, options: Mapping[str, object], *, programs: Path | None = None) -> Figures:
    """Run W8: W4 with a cold cache, then the same in a new process that restores the first one's pages.

    Prefill ends with the last request's first token. `programs` is a cache directory with compiled programs, so that
    the first process need not compile them. Neither process compiles during its measurement.
    """
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as cache:
        if programs is not None and (programs / "programs").exists():
            shutil.copytree(programs / "programs", Path(cache) / "programs")
        for role in ("cold", "restored"):
            order = {"do": role, "model": model, "options": {**RESTART, **options, "cache_dir": cache}}
            answer = _child(order, time.perf_counter())
            figures |= {f"{role}_{name}": value for name, value in answer["figures"].items()}
    return figures | {"restored_share": figures["restored_prefill_s"] / figures["cold_prefill_s"]}


def _child(order: dict[str, Any], start: float) -> dict[str, Any]:
    """Run `main` in another process; the first line that it prints ends the measurement."""
    command = [sys.executable, "-m", "rekindle._src.bench.workloads", json.dumps(order)]
    # An installed package comes with bytecode; a source tree has to be allowed to write it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        seconds = time.perf_counter() - start
        child.stdout.read()
    if child.returncode or not line:
        raise RuntimeError(f"{' '.join(command[:3])} {order['do']} ended with status {child.returncode}")
    return {**json.loads(line), "seconds": seconds}


def main() -> None:
    order = json.loads(sys.argv[1])
    answer = _first(order) if order["do"] == "first" else _shared_prefix(order)
    if answer:
        print(json.dumps(answer), flush=True)


def _first(order: dict[str, Any]) -> dict[str, Any]:
    with gc_paused(stays=True):  # as in `rekindle.open_sync`
        from rekindle._src.session.opening import open_sync

    with open_sync(order["model"], quiet=True, **order["options"]) as session:
        session.generate_sync(list(range(3, 3 + FIRST_PROMPT)), max_tokens=1, ignore_eos=True)
        # Printed here, so that closing the session is not measured.
        print(json.dumps({"peak_bytes": system.peak_memory()}), flush=True)
    return {}


def _shared_prefix(order: dict[str, Any]) -> dict[str, Any]:
    from rekindle._src.session.opening import open_sync

    prompts = RandomPrompts(500)  # ids below 500 are in every vocabulary
    prefix, unrelated = prompts(SHARED), prompts(SHARED)
    requests, warm_up = ([start + prompts(32) for _ in range(16)] for start in (prefix, unrelated))
    restored = order["do"] == "restored"
    with open_sync(order["model"], quiet=True, restore=SNAPSHOT if restored else None, **order["options"]) as session:
        if not restored:  # restoring does not save the cost of a first run
            anyio.run(together, session, warm_up, [32] * 16)
        result = anyio.run(together, session, requests, [32] * 16)
        if not restored:
            session.save(SNAPSHOT).result_sync()
        figures = {"wall_s": result["wall_s"], "prefill_s": result["ttft_max_ms"] / 1e3}
        return {"figures": {**figures, "ttft_p50_ms": result["ttft_p50_ms"]}}


if __name__ == "__main__":
    main()
