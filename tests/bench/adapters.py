"""The cost of adapters: decode and prefill of a session with many of them, beside the same rows without.

    python tests/bench/adapters.py [135m] [--adapters 8] [--rank 16] [--rows 16] [--repeat 5] [--dtype bfloat16]
                                   [--targets all-linear]
    python tests/bench/adapters.py --idle [135m] …
    python tests/bench/adapters.py --kernel [--repeat 5]

One session has both, and runs them in turn, so that a busy machine slows both; the ratio is the median of the ratios of
a pair. Adapters are random. Their targets are all linear layers but experts, those of attention (`--targets attention`:
q, k, v and o), or what PEFT chooses for Llama (`--targets peft-default`: q and v). With `--idle` no row has one: a
session with all of them on the device runs in turn with a session that was opened without any. With `--kernel`, the
adapters of one product alone, native and by XLA.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import anyio
import numpy as np

import rekindle
from rekindle._src.bench.shapes import random_shape
from rekindle._src.models.adapters.sites import sites_of
from rekindle._src.models.config import ModelConfig

TARGETS = {
    "all-linear": (),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "peft-default": ("q_proj", "v_proj"),
}  # () for all


def tensors(config: ModelConfig, seed: int, rank: int, targets: Sequence[str]) -> dict[str, np.ndarray]:
    """Return random matrices for the linear layers with these names, or all but experts, under PEFT's names."""
    random, state = np.random.default_rng(seed), dict[str, np.ndarray]()
    for site in (site for site in sites_of(config).sites if not site.experts):
        for index, name in enumerate(site.modules):
            if targets and name.rpartition(".")[2] not in targets:
                continue
            state[f"{name}.lora_A.weight"] = random.standard_normal((rank, site.inputs), np.float32) * 0.02
            state[f"{name}.lora_B.weight"] = random.standard_normal((site.rows_of(index), rank), np.float32) * 0.02
    return state


async def rates(
    session: Any, names: Sequence[str | None], prompts: Sequence[list[int]], tokens: int
) -> tuple[float, float]:
    """Return prompt tokens/s until the last row has its first token, and tokens/s of all rows from then on.

    Rows whose prompt was computed sooner have tokens by then, which count for neither.
    """
    firsts: list[float] = []
    arrived: list[tuple[float, int]] = []  # when, and how many tokens

    async def read(handle: Any) -> None:
        first = True
        async for delta in handle:
            now = time.perf_counter()
            arrived.append((now, len(delta.token_ids)))
            if first:
                firsts.append(now)
                first = False

    start = time.perf_counter()
    async with anyio.create_task_group() as group:
        for index, ids in enumerate(prompts):
            name = names[index % len(names)]
            # A salt of its own: no row finds another's pages.
            salt = f"{start} {index}"
            group.start_soon(
                read, session.submit(ids, adapter=name, salt=salt, max_tokens=tokens, ignore_eos=True, temperature=0.0)
            )
    end, last = time.perf_counter(), max(firsts)
    decoded = sum(count for when, count in arrived if when > last)
    return sum(map(len, prompts)) / (last - start), decoded / (end - last)


def _print(runs: dict[str, list[tuple[float, float]]]) -> None:
    """Print medians of all but the first run, and those of the ratios to the base's run beside it."""
    for which, what in enumerate(("prefill", "decode")):
        for kind, measured in runs.items():
            ratios = [own[which] / base[which] for own, base in zip(measured[1:], runs["base"][1:], strict=True)]
            median = statistics.median(one[which] for one in measured[1:])
            print(
                f"{what} {kind}: {median:.0f} tokens/s, {statistics.median(ratios):.3f} of the base's "
                f"({min(ratios):.3f} to {max(ratios):.3f})"
            )


async def sessions(arguments: argparse.Namespace) -> None:
    """Print the medians with and without adapters, and of the ratio of each pair."""
    loaded, rows = random_shape(arguments.model, dtype=arguments.dtype), arguments.rows
    random = np.random.default_rng(0)
    prompts = [random.integers(3, loaded.config.vocab_size, 256).tolist() for _ in range(rows)]
    names, targets = [f"a{index}" for index in range(arguments.adapters)], TARGETS[arguments.targets]
    options: dict[str, Any] = {
        "quiet": True, "disk_memory": 0, "max_requests": rows, "max_model_len": 512, "max_adapters": len(names),
        "max_adapter_rank": max(16, arguments.rank), "max_tokens_per_step": 512,
    }  # fmt: skip
    adapters = {name: tensors(loaded.config, index, arguments.rank, targets) for index, name in enumerate(names)}
    millions = sum(array.size for state in adapters.values() for array in state.values()) / 1e6
    print(
        f"{len(names)} adapters of rank {arguments.rank}, targets {arguments.targets} "
        f"({', '.join(targets) or 'but experts'}), {millions:.1f} million numbers; {rows} rows, {arguments.dtype}",
        flush=True,
    )
    if arguments.idle:
        async with (
            rekindle.open(loaded, adapters=adapters, **options) as having,
            rekindle.open(loaded, **{**options, "max_adapters": 0}) as bare,
        ):
            await having.generate(prompts, adapter=names[0], max_tokens=1)
            for name in names:
                await having.generate(prompts[0], adapter=name, max_tokens=1)
            idle: dict[str, list[tuple[float, float]]] = {"base": [], "adapters on the device": []}
            for _ in range(arguments.repeat + 1):
                idle["base"].append(await rates(bare, [None], prompts, 64))
                idle["adapters on the device"].append(await rates(having, [None], prompts, 64))
        _print(idle)
        return
    async with rekindle.open(loaded, adapters=adapters, **options) as session:
        runs: dict[str, list[tuple[float, float]]] = {"base": [], "adapters": [], "one adapter": []}
        for _ in range(arguments.repeat + 1):
            for kind, chosen in (("base", [None]), ("adapters", names), ("one adapter", names[:1])):
                runs[kind].append(await rates(session, chosen, prompts, 64))
        _print(runs)


def kernel(repeat: int) -> None:
    """Print the times of one product's adapters, 16 and 256 tokens over 8 of rank 16."""
    import jax
    import jax.numpy as jnp

    from rekindle_kernels import AdaptedTokens, add_adapters

    random = np.random.default_rng(0)
    for count in (1, 16, 256):
        for inputs, outputs in ((576, (576, 192, 192)), (576, (1536, 1536)), (1536, (576,))):
            y, x = (jnp.asarray(random.standard_normal((count, size), np.float32)) for size in (sum(outputs), inputs))
            down = jnp.asarray(random.standard_normal((len(outputs) * 128, inputs), np.float32)).astype(jnp.bfloat16)
            up = jnp.asarray(random.standard_normal((128, sum(outputs)), np.float32)).astype(jnp.bfloat16)
            owners, slots = jnp.arange(1, 9)[None].astype(jnp.int32), jnp.arange(count, dtype=jnp.int32) % 8 + 1
            best: dict[str, list[float]] = {}
            for name in ("native", "xla"):

                def added(*arrays: Any, name: str = name, outputs: tuple[int, ...] = outputs) -> Any:
                    return add_adapters(
                        *arrays[:-1], AdaptedTokens.of(arrays[-1]), place=0, outputs=outputs, implementation=name
                    )

                arrays = y, x, down, up, owners, slots
                compiled = jax.jit(added).lower(*arrays).compile()
                jax.block_until_ready(compiled(*arrays))
                for _ in range(repeat * 20):
                    start = time.perf_counter()
                    jax.block_until_ready(compiled(*arrays))
                    best.setdefault(name, []).append(time.perf_counter() - start)
            times = ", ".join(f"{name} {min(values) * 1e6:.0f} µs" for name, values in best.items())
            print(f"{count} tokens, {inputs} -> {'+'.join(map(str, outputs))}: {times}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="135m")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--targets", choices=TARGETS, default="all-linear")
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--kernel", action="store_true")
    arguments = parser.parse_args()
    if arguments.kernel:
        kernel(arguments.repeat)
    else:
        anyio.run(sessions, arguments)


if __name__ == "__main__":
    main()
