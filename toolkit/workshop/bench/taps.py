"""The cost of taps: tokens/s of 16 requests that capture or steer, compared with the same requests without.

    python taps.py MODEL [--rounds 5] [--vectors 1000] [--only decode]
    python taps.py MODEL --before FOLDER [--rounds 3]
    python taps.py MODEL --none [--rounds 9]

All kinds take turns in a session, in an order that turns from round to round: decode with short prompts, and prefill
of long ones. Ratios are those of the best rounds, since other work on the machine only ever slows a round down, and of
the medians. `--only` does one part: decode, prefill or vectors.
`--vectors` are the different steering vectors, layers and scales that follow, of which none may compile anything.
`--before` compares this tree with another one, whose folder has `toolkit` and `kernels`, in pairs of processes:
requests that never tap, decode with 1 and 16 rows, and prefill. `--none` compares two sessions in one process, of which
one has no features of taps, and takes turns between them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np

from rekindle._src.capabilities.captures.request import TAPS
from rekindle._src.programs.buckets import ProgramVariant

ROWS, PROMPT, NEW, LONG = 16, 12, 64, 128
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def opened(model: str) -> Any:
    import rekindle

    return rekindle.open(model, max_requests=ROWS, max_tokens_per_step=512, max_model_len=1024, quiet=True)


def prompts(rng: np.random.Generator, count: int, length: int) -> list[list[int]]:
    return [rng.integers(100, 2_000, length).tolist() for _ in range(count)]


async def rate(session: Any, inputs: list[list[int]], new: int, **options: Any) -> float:
    """Return the new tokens/s, or the prompts' where only one token is generated."""
    await session.cache.clear(tier="memory")
    start = time.perf_counter()
    await session.generate(inputs, max_tokens=new, **GREEDY, **options)
    seconds = time.perf_counter() - start
    return len(inputs) * (new if new > 1 else len(inputs[0])) / seconds


async def compare(
    session: Any, kinds: dict[str, dict[str, Any]], inputs: list[list[int]], new: int, rounds: int
) -> None:
    """Print the rates of several kinds of requests, and their ratios to the first kind's."""
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for number, name in harness.turns(kinds, rounds):
        rates[name] += [await rate(session, inputs, new, **kinds[name])] * (number >= 0)
    plain = rates[next(iter(kinds))]
    print("decode" if new > 1 else "prefill")
    for name, values in rates.items():
        ratios = max(values) / max(plain), statistics.median(values) / statistics.median(plain)
        print(f"{name:22} {max(values):8.1f} tokens/s, {ratios[0]:.3f} of plain; medians {ratios[1]:.3f}", flush=True)


async def taps(model: str, rounds: int, vectors: int, only: str) -> None:
    import rekindle

    async with opened(model) as session:
        facts, rng = TAPS.of(session._front), np.random.default_rng(0)
        every = range(min(24, facts.layers))
        layer, direction = facts.layers // 2, rng.standard_normal(facts.hidden_size)
        kinds: dict[str, dict[str, Any]] = {
            "plain": {},
            "one residual": {"capture": {"residual": layer}},
            "24 residuals": {"capture": {"residual": list(every)}},
            "all residuals": {"capture": {"residual": "all"}},
            "attention of a layer": {"capture": {"attention": layer}},
            "one vector": {"steer": rekindle.Steer(layer, direction, 0.01)},
            "a vector per layer": {"steer": [rekindle.Steer(i, direction, 0.001) for i in every]},
            "attention's output": {"steer": rekindle.Steer(layer, direction, 0.01, site="attention")},
        }
        inputs = prompts(rng, ROWS, PROMPT)
        if only in ("", "decode"):
            await compare(session, kinds, inputs, NEW, rounds)
        if only in ("", "prefill"):
            await compare(session, kinds, prompts(rng, ROWS, LONG), 1, rounds)
        if only not in ("", "vectors"):
            return

        async def sweep(count: int) -> None:
            for start in range(0, count, ROWS):
                steers = [
                    rekindle.Steer(int(rng.integers(facts.layers)), rng.standard_normal(facts.hidden_size), scale)
                    for scale in rng.uniform(-4, 4, min(ROWS, count - start))
                ]
                calls = (session.generate(inputs[0], max_tokens=2, **GREEDY, steer=steer) for steer in steers)
                await asyncio.gather(*calls)

        programs = session._engine.runner.programs
        sizes = programs.lattice_for(ProgramVariant.STEERING, late=False)
        for size in sizes:  # a sweep's first requests compile them, one for each number of rows and tokens that come up
            programs.get(size)
        await sweep(ROWS)
        print(f"{len(sizes)} programs of steps with changes")
        compiled, start = session.stats().compilations, time.perf_counter()
        await sweep(vectors)
        seconds = time.perf_counter() - start
        print(f"{vectors} vectors: {seconds:.1f} s, {session.stats().compilations - compiled} programs compiled")


def loads() -> dict[str, tuple[list[list[int]], int]]:
    """Return requests that never tap: prompts, and the number of new tokens."""
    rng = np.random.default_rng(0)
    return {
        "decode of 1": (prompts(rng, 1, PROMPT), 2 * NEW),
        "decode of 16": (prompts(rng, ROWS, PROMPT), NEW),
        "prefill": (prompts(rng, 4, 512), 1),
    }


async def _untapped(model: str, rounds: int) -> dict[str, float]:
    best = {}
    async with opened(model) as session:
        for name, (inputs, new) in loads().items():
            best[name] = max([await rate(session, inputs, new) for _ in range(rounds + 1)])
    return best


def untapped(model: str, rounds: int) -> dict[str, float]:
    """The rates of one tree, in a process of its own."""
    return asyncio.run(_untapped(model, rounds))


def pairs(model: str, before: Path, rounds: int) -> None:
    """Compare two trees, in an order that turns."""
    reports: dict[Path, list[dict[str, float]]] = {harness.ROOT: [], before: []}
    for _, tree in harness.turns(reports, rounds, 0):
        reports[tree].append(harness.child(untapped, model, 3, root=tree))
    for name in loads():
        show_pairs(name, *([report[name] for report in reports[tree]] for tree in reports))


async def beside_none(model: str, rounds: int) -> None:
    """Compare a session with one that has no features of taps, in an order that turns."""
    from rekindle._src.capabilities.captures import plan

    async with opened(model) as tapping:
        plan.tap_features = lambda *_, **__: ()
        async with opened(model) as none:
            for name, (inputs, new) in loads().items():
                rates: dict[Any, list[float]] = {tapping: [], none: []}
                for number, session in harness.turns(rates, rounds):
                    rates[session] += [await rate(session, inputs, new)] * (number >= 0)
                show_pairs(name, *rates.values())


def show_pairs(name: str, now: list[float], then: list[float]) -> None:
    paired = harness.ratios(now, then)
    shown = " ".join(f"{ratio:.3f}" for ratio in paired)
    print(
        f"{name:14} {statistics.median(now):8.1f} tokens/s, {statistics.median(paired):.3f} of the other ({shown})",
        flush=True,
    )


def main() -> None:
    given = harness.options(
        __doc__, "model", model=str, rounds=5, vectors=1000, only=("", ("decode", "prefill", "vectors")),
        before=(Path, "another tree"), none=False,
    )  # fmt: skip
    if given.before is not None:
        pairs(given.model, given.before.resolve(), given.rounds)
    elif given.none:
        asyncio.run(beside_none(given.model, given.rounds))
    else:
        asyncio.run(taps(given.model, given.rounds, given.vectors, given.only))


if __name__ == "__main__":
    main()
