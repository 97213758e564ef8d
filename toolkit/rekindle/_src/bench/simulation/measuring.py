"""Measures the pace of this machine: a session answers prompts and batches of all sizes, and chats."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import anyio

from rekindle._src.bench.simulation.fleet import Watch, simulate
from rekindle._src.bench.simulation.loads import SimulatedRequest, chats, percentile
from rekindle._src.bench.simulation.step_cost import StepCost, StepTimes, StepWork
from rekindle._src.session.opening import open_sync
from rekindle._src.session.session import Session

CHATS = 120  # requests of the chats
BUSY = 0.15  # approximate share of the time in which they keep the device busy
OUTPUT = 24  # tokens


class Measured(NamedTuple):
    """The pace of an open session on this machine."""

    cost: StepCost
    spread: tuple[float, ...]  # see `StepCost.spread`


def measure_model(model: str, **options: Any) -> Measured:
    """Open a model and return its pace."""
    with open_sync(model, **{"quiet": True, "disk_memory": 0, **options}) as session:
        return measure(session)


def measure(session: Session, *, seed: int = 0) -> Measured:
    """Return the pace of an open session. The first round only compiles.

    A request's cost beside its steps is the time by which first tokens of chats took longer than in a simulation of
    the steps alone: a request among others waits for more than the device.
    """
    draw = random.Random(seed)
    times, batches = StepTimes(), StepTimes()
    for observer in (None, batches):
        if observer is not None:
            session._host.observe(observer)
        for rows in (1, 2, 4, 8, session.config.max_requests):
            prompts = [_prompt(draw, session) for _ in range(rows)]
            anyio.run(_stream, session, prompts)
        session.cache.clear().result_sync()
    session._host.unobserve(batches)
    asks = _chats(draw, session, StepCost.fit(_usable(batches)))
    for watched in (False, True):
        if watched:
            session._host.observe(times)
        watch, _ = anyio.run(replay, session, asks)
        session.cache.clear().result_sync()
    session._host.unobserve(times)
    steps = _usable(times)
    cost = StepCost.fit([*steps, *_usable(batches)])
    simulated = simulate(asks, session.config, cost, spread=cost.spread(steps))
    overhead = max(0.0, percentile(watch.first, 0.5) - simulated.first_token[0])
    return Measured(dataclasses.replace(cost, request=overhead), cost.spread(steps))


async def replay(target: Any, asks: Sequence[SimulatedRequest], watch: Watch | None = None) -> tuple[Watch, float]:
    """Send requests when they are due and read every delta as it arrives, as clients do.

    Returns the arrival times of tokens, and the seconds of the whole run.
    """
    watch, vocabulary, began = watch or Watch(), target._engine.vocab_size, time.perf_counter()

    async def stream_one(number: int, ask: SimulatedRequest) -> None:
        prompt = (ask.tokens() % vocabulary).tolist()
        await anyio.sleep(max(0.0, began + ask.at - asks[0].at - time.perf_counter()))
        name = str(number)
        watch.submitted(name, time.perf_counter())
        async for delta in target.stream(prompt, max_tokens=ask.output, ignore_eos=True):
            if delta.token_ids:
                watch.received(name, len(delta.token_ids), time.perf_counter(), ended=False)

    async with anyio.create_task_group() as group:
        for number, ask in enumerate(asks):
            group.start_soon(stream_one, number, ask)
    return watch, time.perf_counter() - began


def _usable(times: StepTimes) -> list[tuple[StepWork, float]]:
    return [(work, seconds) for work, seconds in times.steps if seconds > 0]


def _chats(draw: random.Random, session: Session, cost: StepCost) -> list[SimulatedRequest]:
    """Return chats that fit into the session's context, at a rate that keeps the device busy now and then."""
    longest = _longest(session)
    question = max(2, longest // 40)
    seconds = cost.seconds(StepWork(0, 2 * question, 0, 1)) + OUTPUT * cost.seconds(StepWork(1, 0, longest // 4))
    asks = chats(
        draw,
        CHATS,
        BUSY / seconds,
        systems=6,
        system_tokens=max(4, longest // 6),
        turns=3,
        question=question,
        output=OUTPUT,
        pause=10 * seconds,
    )
    return [ask for ask in asks if ask.length + ask.output < longest]


async def _stream(session: Session, prompts: Sequence[Sequence[int]]) -> None:
    async def read(prompt: Sequence[int]) -> None:
        async for _ in session.stream(prompt, max_tokens=OUTPUT, ignore_eos=True):
            pass

    async with anyio.create_task_group() as group:
        for prompt in prompts:
            group.start_soon(read, prompt)


def _longest(session: Session) -> int:
    longest = session.config.max_model_len
    assert longest is not None, "an open session has resolved it"
    return min(1024, longest)


def _prompt(draw: random.Random, session: Session) -> list[int]:
    size = min(_longest(session) - 32, int(2 ** draw.uniform(4, 10)))
    return [draw.randrange(1, session._engine.vocab_size) for _ in range(max(1, size))]
