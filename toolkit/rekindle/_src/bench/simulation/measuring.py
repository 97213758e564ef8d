"""The cost of steps, measured on this machine: a session answers prompts of all sizes, in batches of all sizes."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import anyio

from rekindle._src.bench.simulation.step_cost import StepCost, StepTimes, StepWork
from rekindle._src.session.opening import open_sync
from rekindle._src.session.session import Session

SOLITARY = 32  # requests of which each has the session to itself


class Measured(NamedTuple):
    """The pace of an open session on this machine."""

    cost: StepCost
    spread: tuple[float, ...]  # see `StepCost.spread`


def measured(model: str, **options: Any) -> Measured:
    """The pace of a model."""
    with open_sync(model, **{"quiet": True, "disk_memory": 0, **options}) as session:
        return measure(session)


def measure(session: Session, *, seed: int = 0) -> Measured:
    """The pace of an open session. The first round only compiles."""
    draw = random.Random(seed)
    times = StepTimes()
    longest = session.config.max_model_len
    assert longest is not None, "an open session has resolved it"
    for observed in (False, True):
        if observed:
            session._host.observe(times)
        short = [_prompt(draw, session, 160) for _ in range(48)]
        anyio.run(_stream, session, short, [draw.uniform(0.0, 4.0) for _ in short])
        for rows in (1, 2, 4, 8, session.config.max_requests):
            prompts = [_prompt(draw, session, longest) for _ in range(rows)]
            anyio.run(_stream, session, prompts, [0.0] * rows)
        session.cache.clear().result_sync()
    session._host.unobserve(times)
    steps = [(work, seconds) for work, seconds in times.steps if seconds > 0]
    cost = StepCost.fitted(steps)
    beside = anyio.run(_beside, session, cost, [_prompt(draw, session, 160) for _ in range(SOLITARY)])
    session.cache.clear().result_sync()
    return Measured(dataclasses.replace(cost, request=beside), cost.spread(steps))


async def _beside(session: Session, cost: StepCost, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds to the first token that a request takes beside its step, when nothing else runs."""
    found: list[float] = []
    for prompt in prompts:
        begun, first = time.perf_counter(), 0.0
        async for _ in session.stream(prompt, max_tokens=4, ignore_eos=True):
            first = first or time.perf_counter() - begun
        found.append(first - cost.seconds(StepWork(0, len(prompt), 0, 1)))
        await anyio.sleep(0.02)  # until the session rests, as it does between requests that come now and then
    return max(0.0, statistics.median(found))


async def _stream(session: Session, prompts: Sequence[Sequence[int]], after: Sequence[float]) -> None:
    """Read every delta as it comes, as those do who are served: their work takes its share of the processor.

    Prompts that come `after` others were begun are computed beside these.
    """

    async def read(prompt: Sequence[int], seconds: float) -> None:
        await anyio.sleep(seconds)
        async for _ in session.stream(prompt, max_tokens=24, ignore_eos=True):
            pass

    async with anyio.create_task_group() as group:
        for prompt, seconds in zip(prompts, after, strict=True):
            group.start_soon(read, prompt, seconds)


def _prompt(draw: random.Random, session: Session, longest: int) -> list[int]:
    size = min(longest - 32, int(2 ** draw.uniform(4, 10)))
    return [draw.randrange(1, session._engine.vocab_size) for _ in range(max(1, size))]
