"""What `deterministic=True` costs, and how often a text depends on the batch without it and with it.

    python batch_invariance.py price [135m] [--repeat 5] [--quantize int8] [--dtype bfloat16]
    python batch_invariance.py texts [--seeds 60] [--quantize int8] [--dtype bfloat16]

`price` has two sessions over the same weights, one with the option and one without, which run each workload in turn, so
that a busy machine slows both. The ratio is the median of the ratios of a pair. `texts` repeats texts of the embedded
model alone, with four others, with fifteen while prompts come in, and without the cache.
"""

from __future__ import annotations

import statistics
from typing import Any

import anyio
import anyio.lowlevel
import harness

import rekindle
from rekindle._src.bench import workloads
from rekindle._src.cli.bench import needed

PROMPT = "Once upon a time there was a little girl called Anna. One day she went"
OTHERS = ["The cat", "Tom and Anna saw a bird in the tree. It was", "One cold day", "Two"]


async def price(model: str, names: list[str], repeat: int, options: dict[str, Any]) -> None:
    """Print the medians of each workload with and without the option, and of the ratio of each pair."""
    loaded = harness.model(model, dtype=options.get("dtype", "bfloat16"), quantize=options.get("quantize"))
    for name in names:
        sizes: dict[str, Any] = needed(loaded, name, {})
        common: dict[str, Any] = {"quiet": True, "disk_memory": 0, **sizes, **options}
        async with (
            rekindle.open(loaded, **common) as plain,
            rekindle.open(loaded, deterministic=True, **common) as fixed,
        ):
            prompts = workloads.RandomPrompts(loaded.config.vocab_size)
            runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
            for _, kept in harness.turns(runs, repeat):
                runs[kept].append(await workloads.WORKLOADS[name](fixed if kept else plain, prompts))
        for figure in runs[False][0]:
            if figure == "idle_share":
                continue
            without, with_it = ([run[figure] for run in runs[key][1:]] for key in (False, True))
            print(
                f"{name} {figure:14} {statistics.median(without):9.1f} without {statistics.median(with_it):9.1f} with, "
                f"ratio {harness.spread(harness.ratios(with_it, without))}",
                flush=True,
            )


async def texts(seeds: int, options: dict[str, Any]) -> None:
    """Print how many of the texts are those that each seed gives alone."""
    for kept in (False, True):
        async with rekindle.open("tiny", deterministic=kept, quiet=True, disk_memory=0, **options) as session:
            print(f"deterministic={kept}: {await compare(session, seeds)}", flush=True)


async def compare(session: rekindle.Session, seeds: int, tokens: int = 60) -> dict[str, str]:
    """For each company in which a text is repeated, in how many of the seeds it is the text that was drawn alone."""
    drawn: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.8, "ignore_eos": True}

    async def text(seed: int) -> tuple[int, ...]:
        return (await session.generate(PROMPT, seed=seed, **drawn)).token_ids

    async def cold(seed: int) -> tuple[int, ...]:
        await session.cache.clear(tier="memory")
        return await text(seed)

    async def beside_four(seed: int) -> tuple[int, ...]:
        async def company(prompt: str) -> None:
            await session.generate(prompt, seed=seed, **drawn)

        async with anyio.create_task_group() as tasks:
            for other in OTHERS:
                tasks.start_soon(company, other)
            await anyio.lowlevel.checkpoint()  # the others come first
            return await text(seed)

    crowded: dict[int, tuple[int, ...]] = {}

    async def crowd(seed: int) -> None:
        crowded[seed] = await text(seed)

    async def prompts_beside() -> None:
        for index in range(seeds // 4):
            await session.generate(
                f"Number {index}. " + "The dog and the cat walked home. " * (3 + index % 9), max_tokens=2
            )

    alone = {seed: await cold(seed) for seed in range(seeds)}
    cached = {seed: await text(seed) for seed in range(seeds)}
    five = {seed: await beside_four(seed) for seed in range(seeds)}
    async with anyio.create_task_group() as tasks:
        for seed in range(seeds):
            tasks.start_soon(crowd, seed)
        tasks.start_soon(prompts_beside)
    kinds = {"cached": cached, "in a batch of 5": five, "in one of 16, with prefill": crowded}
    return {
        kind: f"{sum(found[seed] == alone[seed] for seed in range(seeds))} of {seeds}" for kind, found in kinds.items()
    }


def main() -> None:
    given = harness.options(
        __doc__, "what model", what=(str, ("price", "texts")), model="135m", workloads="W1,W2,W3", repeat=5, seeds=60,
        dtype="bfloat16", quantize=str,
    )  # fmt: skip
    options = {"dtype": given.dtype} | ({"quantize": given.quantize} if given.quantize else {})
    if given.what == "price":
        anyio.run(price, given.model, given.workloads.split(","), given.repeat, options)
    else:
        anyio.run(texts, given.seeds, options)


if __name__ == "__main__":
    main()
