"""What a fleet costs and brings on this machine, compared with what the simulator predicts.

python fleet.py overhead      one replica against a session: tokens/s, a request, HTTP
python fleet.py prediction    the simulator's one replica against the real engine
python fleet.py routers       routers on a load of shared prefixes, two replicas, against the simulator
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import anyio
import harness

import rekindle
from helpers.sessions import eventually
from rekindle._src.bench.simulation import (
    HEAD,
    SimulatedRequest,
    SimulationOutcome,
    StepCost,
    StepTimes,
    Watch,
    chats,
    measure,
    percentile,
    replay,
    simulate,
)

OPTIONS: dict[str, Any] = {
    "max_requests": 16, "max_tokens_per_step": 256, "max_model_len": 1024, "disk_memory": 0, "host_memory": 0,
    "quiet": True,
}  # fmt: skip
SMALL = {"systems": 6, "system_tokens": 160, "turns": 3, "question": 24, "output": 24, "pause": 1.0}


def small_chats(requests: int, rate: float, seed: int = 1) -> list[SimulatedRequest]:
    """Conversations that fit into the embedded model's context."""
    found = chats(random.Random(seed), requests, rate, **SMALL)
    return [ask for ask in found if ask.length + ask.output < 900]


def outcome(watch: Watch, seconds: float, stats: Any, before: Any, requests: int) -> SimulationOutcome:
    prompts = stats.prompt_tokens - before.prompt_tokens
    return SimulationOutcome(
        requests=requests, refused=0, seconds=seconds, hit_rate=(stats.cached_tokens - before.cached_tokens) / prompts,
        imbalance=getattr(stats, "imbalance", 1.0), busy=0.0,
        first_token=(percentile(watch.first, 0.5), percentile(watch.first, 0.99)),
        between=(percentile(watch.between, 0.5), percentile(watch.between, 0.99)),
        tokens_per_second=watch.tokens / seconds,
    )  # fmt: skip


async def warm(target: Any) -> None:
    """Compile what the loads need."""
    for rows in (1, 2, 4, 8, 16):
        for size in (8, 60, 200, 500):
            prompts = [[(7 * row + at) % 200 + 1 for at in range(size)] for row in range(rows)]
            await target.generate(prompts, max_tokens=6, ignore_eos=True)


async def prediction(arguments: Any) -> None:
    """The pace is measured on other requests than those whose times are then predicted."""
    asks = small_chats(arguments.requests, arguments.rate)
    async with rekindle.open(harness.model(arguments.model), **OPTIONS) as session:
        await warm(session)
        rounds: list[tuple[dict[str, float], dict[str, float]]] = []
        for number in range(arguments.rounds):
            cost, spread = await anyio.to_thread.run_sync(measure, session)
            print(f"{cost}; a tenth of the steps take {spread[len(spread) * 9 // 10]:.2f} times as long or longer")
            await session.cache.clear()
            before, times = session.stats(), StepTimes()
            session._client.observe(times)
            watch, seconds = await replay(session, asks)
            session._client.unobserve(times)
            real = outcome(watch, seconds, session.stats(), before, len(asks))
            told = simulate(asks, session.config, cost, spread=spread)
            if not number:
                print(f"{'':24}{HEAD}")
            print(f"{'real':24}{real}\n{'simulated':24}{told}")
            busy = [(work, taken) for work, taken in times.steps if taken > 0]
            again = StepCost.fit(busy)
            spent = sum(taken for _, taken in busy)
            told_spent = sum(cost.seconds(work) for work, _ in busy) * statistics.fmean(spread)
            usual = statistics.median(taken / cost.seconds(work) for work, taken in busy)
            print(
                f"  {len(busy)} steps took {spent:.2f} s, the model says {told_spent:.2f} s; "
                f"the usual one took {usual:.2f} times what it says. Fitted to them: {again}",
                flush=True,
            )
            rounds.append((told_figures(told), told_figures(real)))
    for name in rounds[0][0]:
        told_all, real_all = [told[name] for told, _ in rounds], [real[name] for _, real in rounds]
        # A round has few requests among its slowest hundredth: the rounds together say what it is.
        ratio = statistics.fmean(told_all) / statistics.fmean(real_all)
        verdict = "within 15 %" if abs(ratio - 1) <= 0.15 else "off"
        print(
            f"simulated / real, {name:16} {ratio:5.2f}, rounds {harness.spread(harness.ratios(told_all, real_all))}: "
            f"{verdict}; real rounds differ by {max(real_all) / min(real_all):.2f}"
        )


def told_figures(found: SimulationOutcome) -> dict[str, float]:
    return {
        "first token p50": found.first_token[0], "first token p99": found.first_token[1],
        "between p50": found.between[0], "between p99": found.between[1], "tokens/s": found.tokens_per_second,
        "cached": found.hit_rate,
    }  # fmt: skip


async def measured(fleet: Any, asks: list[SimulatedRequest], watch: Watch) -> tuple[SimulationOutcome, Any]:
    """Replay a load on a fleet of two; what came of it, and the fleet's figures afterwards."""
    await anyio.to_thread.run_sync(eventually, lambda: fleet.stats().ready == 2, 120.0)
    await warm(fleet)
    await anyio.sleep(2.5)  # figures come with the mail
    before = fleet.stats()
    watch, seconds = await replay(fleet, asks, watch)
    await anyio.sleep(2.5)
    after = fleet.stats()
    return outcome(watch, seconds, after, before, len(asks)), after


async def pace(options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The cost of a step of the embedded model, its spread, and the session's config, for the simulator."""
    async with rekindle.open("tiny", **options) as session:
        await warm(session)
        cost, spread = await anyio.to_thread.run_sync(measure, session)
        return cost, spread, session.config


async def routers(arguments: Any) -> None:
    asks = small_chats(arguments.requests, arguments.rate)
    options = {**OPTIONS, "device_pages": arguments.pages}
    cost, spread, config = await pace(options)
    print(f"{'':24}{HEAD}")
    for router in ("affinity", "shortest", "round-robin"):
        async with rekindle.fleet("tiny", replicas=2, router=router, **options) as fleet:  # type: ignore[arg-type]
            print(f"{router + ', real':24}{(await measured(fleet, asks, Watch()))[0]}")
        told = simulate(asks, config, cost, replicas=2, router=router, spread=spread)
        print(f"{router + ', simulated':24}{told}", flush=True)


async def timed(call: Callable[[], Any], times: int) -> float:
    """The median of the seconds that a call takes."""
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


async def figures(target: Any) -> dict[str, float]:
    await warm(target)
    prompts = [f"{number} Once upon a time" for number in range(16)]

    async def one(prompt: str) -> None:
        async for _ in target.stream(prompt, max_tokens=128, ignore_eos=True):
            pass

    async def streams() -> None:
        async with anyio.create_task_group() as group:
            for prompt in prompts:
                group.start_soon(one, prompt)

    single = functools.partial(one, "Once upon a time")
    least = functools.partial(target.generate, "Once upon a time", max_tokens=1)
    begun = time.process_time()
    seconds = await timed(streams, 5)
    cpu = (time.process_time() - begun) / 5
    found = {
        "16 streams, tokens/s": 16 * 128 / seconds,
        "µs of this process a token": cpu / (16 * 128) * 1e6,
        "one stream, tokens/s": 128 / await timed(single, 5),
        "a request of one token, ms": 1e3 * await timed(least, 50),
    }
    import httpx

    server = await target.serve()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        body = {"prompt": "Once upon a time", "max_tokens": 1}

        async def post() -> None:
            (await client.post("/v1/completions", json=body)).raise_for_status()

        async def streamed() -> None:
            more = {**body, "max_tokens": 128, "stream": True, "ignore_eos": True}
            async with client.stream("POST", "/v1/completions", json=more) as reply:
                async for _ in reply.aiter_lines():
                    pass

        await timed(post, 5)
        found["the same over HTTP, ms"] = 1e3 * await timed(post, 50)
        found["a stream over HTTP, tokens/s"] = 128 / await timed(streamed, 5)
    return found


async def overhead(arguments: Any) -> None:
    async with rekindle.open("tiny", **OPTIONS) as session:
        alone = await figures(session)
    async with rekindle.fleet("tiny", replicas=1, **OPTIONS) as fleet:
        apart = await figures(fleet)
    print(f"{'':32}{'session':>10}{'fleet of 1':>12}")
    for name, value in alone.items():
        print(f"{name:32}{value:10.1f}{apart[name]:12.1f}")


def main() -> None:
    modes = ("overhead", "prediction", "routers")
    arguments = harness.options(
        __doc__, "what", what=(str, modes), requests=200, rate=(10.0, "requests a second"),
        pages=(160, "routers: KV pages of a replica"), model=("tiny", "prediction: tiny, or a shape"), rounds=3,
    )  # fmt: skip
    anyio.run({"overhead": overhead, "prediction": prediction, "routers": routers}[arguments.what], arguments)


if __name__ == "__main__":
    main()
