"""The cost of steps, measured on this machine: a session answers prompts of all sizes, in batches of all sizes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import anyio

from rekindle._src.bench.simulation.step_cost import StepCost, StepTimes
from rekindle._src.session.opening import open_sync
from rekindle._src.session.session import Session


def measured(model: str, **options: Any) -> StepCost:
    """The cost of a model's steps."""
    with open_sync(model, **{"quiet": True, "disk_memory": 0, **options}) as session:
        return measure(session)


def measure(session: Session, *, seed: int = 0) -> StepCost:
    """The cost of the steps of an open session. The first round only compiles."""
    draw = random.Random(seed)
    times = StepTimes()
    longest = session.config.max_model_len
    assert longest is not None, "an open session has resolved it"
    for observed in (False, True):
        if observed:
            session._host.observe(times)
        short = [_prompt(draw, session, 160) for _ in range(24)]
        anyio.run(_stream, session, short, [draw.uniform(0.0, 2.0) for _ in short])
        for rows in (1, 2, 4, 8, session.config.max_requests):
            prompts = [_prompt(draw, session, longest) for _ in range(rows)]
            anyio.run(_stream, session, prompts, [0.0] * rows)
        session.cache.clear().result_sync()
    session._host.unobserve(times)
    return StepCost.fitted([(work, seconds) for work, seconds in times.steps if seconds > 0])


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
