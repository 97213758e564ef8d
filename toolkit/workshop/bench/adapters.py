"""The cost of adapters: decode and prefill of a session with many of them, compared with the same rows without.

    python adapters.py [135m] [--adapters 8] [--rank 16] [--rows 16] [--repeat 5] [--dtype bfloat16]
                                   [--targets all-linear]
    python adapters.py --idle [135m] …
    python adapters.py --kernel [--repeat 5]

One session has both, and runs them in turn, so that a busy machine slows both; the ratio is the median of the ratios of
a pair. Adapters are random. Their targets are all linear layers but experts, those of attention (`--targets attention`:
q, k, v and o), or what PEFT chooses for Llama (`--targets peft-default`: q and v). With `--idle` no row has one: a
session with all of them on the device runs in turn with a session that was opened without any. With `--kernel`, the
adapters of one product alone, native and by XLA.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import anyio
import harness
import numpy as np

import rekindle
from helpers import adapters as peft

TARGETS = {
    "all-linear": (),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "peft-default": ("q_proj", "v_proj"),
}  # () for all


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
    """Print the medians of all runs but the first, and their ratios to the base's run of the same round."""
    for which, what in enumerate(("prefill", "decode")):
        for kind, measured in runs.items():
            own, base = ([one[which] for one in some[1:]] for some in (measured, runs["base"]))
            shares = harness.spread(harness.ratios(own, base))
            print(f"{what} {kind}: {statistics.median(own):.0f} tokens/s, {shares} of the base's")


async def sessions(arguments: argparse.Namespace) -> None:
    """Print the medians with and without adapters, and of the ratio of each pair."""
    loaded, rows = harness.model(arguments.model, dtype=arguments.dtype), arguments.rows
    random = np.random.default_rng(0)
    prompts = [random.integers(3, loaded.config.vocab_size, 256).tolist() for _ in range(rows)]
    names, targets = [f"a{index}" for index in range(arguments.adapters)], TARGETS[arguments.targets]
    options: dict[str, Any] = {
        "quiet": True, "disk_memory": 0, "max_requests": rows, "max_model_len": 512, "max_adapters": len(names),
        "max_adapter_rank": max(16, arguments.rank), "max_tokens_per_step": 512,
    }  # fmt: skip
    modules = peft.modules(loaded.config, targets or None)
    adapters = {
        name: peft.tensors(loaded.config, modules, index, {}, rank=arguments.rank) for index, name in enumerate(names)
    }
    millions = sum(array.size for state in adapters.values() for array in state.values()) / 1e6
    print(
        f"{len(names)} adapters of rank {arguments.rank}, targets {arguments.targets} "
        f"({', '.join(targets) or 'but experts'}), {millions:.1f} million numbers; {rows} rows, {arguments.dtype}",
        flush=True,
    )
    async with contextlib.AsyncExitStack() as stack:
        having = await stack.enter_async_context(rekindle.open(loaded, adapters=adapters, **options))
        kinds: dict[str, tuple[Any, list[Any]]] = {
            "base": (having, [None]), "adapters": (having, names), "one adapter": (having, names[:1]),
        }  # fmt: skip
        if arguments.idle:
            bare = await stack.enter_async_context(rekindle.open(loaded, **{**options, "max_adapters": 0}))
            kinds = {"base": (bare, [None]), "adapters on the device": (having, [None])}
            for name in names:
                await having.generate(prompts if name == names[0] else prompts[0], adapter=name, max_tokens=1)
        runs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _, kind in harness.turns(kinds, arguments.repeat):
            session, chosen = kinds[kind]
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
                arrays = y, x, down, up, owners, slots
                adding = functools.partial(add_adapters, place=0, outputs=outputs, implementation=name)
                added = jax.jit(lambda *given, adding=adding: adding(*given[:-1], AdaptedTokens.of(given[-1])))
                compiled = added.lower(*arrays).compile()
                jax.block_until_ready(compiled(*arrays))
                for _ in range(repeat * 20):
                    start = time.perf_counter()
                    jax.block_until_ready(compiled(*arrays))
                    best.setdefault(name, []).append(time.perf_counter() - start)
            times = ", ".join(f"{name} {min(values) * 1e6:.0f} µs" for name, values in best.items())
            print(f"{count} tokens, {inputs} -> {'+'.join(map(str, outputs))}: {times}")


def main() -> None:
    given = harness.options(
        __doc__, "model", model="135m", adapters=8, rank=16, rows=16, repeat=5, dtype="bfloat16",
        targets=("all-linear", TARGETS), idle=False, kernel=False,
    )  # fmt: skip
    if given.kernel:
        kernel(given.repeat)
    else:
        anyio.run(sessions, given)


if __name__ == "__main__":
    main()
