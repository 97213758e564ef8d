"""`python -m kernel_workshop.tune` times block sizes on the device at hand and prints lines for `tuning.py`."""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rekindle_kernels import deprecated, tuning
from rekindle_kernels.ops.attention import AttentionCall, AttentionInputs, AttentionOptions
from rekindle_kernels.ops.memory import init_pages
from rekindle_kernels.ops.registry import current_platform
from rekindle_kernels.pages import LayerKV, needs_scales
from rekindle_kernels.pallas.gpu import attention as gpu
from rekindle_kernels.pallas.gpu import mosaic
from rekindle_kernels.pallas.tpu import attention as tpu

GROUP, KV_HEADS = 4, 8
Choices = Mapping[str, Sequence[int]]
# The candidates for each field. Decode has one buffer of keys and values less than it has stages: one for two stages.
DECODE: Choices = {
    "num_stages": (2, 3, 4, 5, 6),
    "block_k": (16, 32, 64, 128),
    "num_warps": (2, 4, 8),
    "waves": (1, 2, 4, 5),
}
PREFILL: Choices = {
    "block_m": (16, 32, 64, 128), "block_k": (16, 32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)
}  # fmt: skip
MOSAIC_PREFILL: Choices = {"block_k": (64, 128, 192), "stages": (2, 3, 4)}
TPU: Choices = {"tokens": (16, 32, 64, 128), "keys": (128, 256, 512, 1024)}


def random_pages(num_pages: int, page_size: int, head_dim: int, dtype: str) -> LayerKV:
    kv = init_pages(num_pages, KV_HEADS, page_size, head_dim, dtype)
    key = jax.random.key(0)
    if needs_scales(dtype):
        pages = jax.random.randint(key, kv.pages.shape, -100, 100).astype(kv.pages.dtype)
        return LayerKV(pages, jnp.full_like(kv.pages[..., 0], 0.01, jnp.float32))
    return LayerKV(jax.random.normal(key, kv.pages.shape, jnp.float32).astype(kv.pages.dtype))


def problem(
    head_dim: int, page_size: int, dtype: str, *, rows: int, chunks: int, chunk: int, context: int
) -> tuple[AttentionInputs, AttentionOptions]:
    """Make `rows` decode rows and `chunks` prefills of `chunk` tokens, all with `context` keys in shuffled pages."""
    sequences = rows + chunks
    width = -(-context // page_size)
    kv = random_pages(sequences * width + 1, page_size, head_dim, dtype)
    table = np.random.default_rng(0).permutation(np.arange(1, sequences * width + 1)).reshape(sequences, width)
    q_dtype = "bfloat16" if needs_scales(dtype) else dtype
    q = jax.random.normal(jax.random.key(1), (rows + chunks * chunk, KV_HEADS * GROUP, head_dim), jnp.float32)
    inputs = AttentionInputs(
        q.astype(q_dtype),
        kv,
        jnp.asarray(table, jnp.int32),
        jnp.full((sequences,), context, jnp.int32),
        jnp.arange(chunks + 1, dtype=jnp.int32) * chunk,
        jnp.asarray(chunks, jnp.int32),
    )
    return inputs, AttentionOptions(decode_rows=rows, scale=head_dim**-0.5)


@deprecated.known()
def seconds(
    run: Callable[[AttentionInputs], jax.Array], inputs: AttentionInputs, *, calls: int = 10, rounds: int = 5
) -> float:
    """Return the median time of one call. Several calls are in flight at once, so that dispatch is not measured."""
    jax.block_until_ready(run(inputs))
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready([run(inputs) for _ in range(calls)])
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def timed(
    attention: Callable[..., jax.Array],
    option: str,
    problems: Sequence[tuple[AttentionInputs, AttentionOptions]],
    candidate: Any,
) -> list[float] | None:
    """Return the candidate's time for each problem; None if it does not compile."""
    try:
        return [
            seconds(jax.jit(partial(attention, options=options, **{option: candidate})), inputs)
            for inputs, options in problems
        ]
    except Exception as error:
        print(f"  {candidate}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
        return None


def best(
    measure: Callable[[Any], list[float] | None], start: Any, choices: Choices, *, budget: float = math.inf
) -> tuple[Any, list[float]] | None:
    """Search from `start` for the configuration with the least product of times, changing one field at a time.

    The search ends when no such change helps, or before the first measurement after `budget` seconds.
    """
    end = time.monotonic() + budget
    measured = {start: measure(start)}
    winner = start
    while True:
        previous = winner
        for name, value in [(name, value) for name, values in choices.items() for value in values]:
            candidate = replace(winner, **{name: value})
            if candidate in measured:
                continue
            if time.monotonic() > end:
                break
            measured[candidate] = measure(candidate)
            if _cost(measured[candidate]) < _cost(measured[winner]):
                winner = candidate
        if winner == previous:
            times = measured[winner]
            return None if times is None else (winner, times)


def _cost(times: list[float] | None) -> float:
    return math.inf if times is None else math.prod(times)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernel_workshop.tune", description=__doc__)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--page-size", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rows", nargs="+", type=int, default=[4, 64], help="decode batch sizes that count equally")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prefill chunk")
    parser.add_argument("--seconds", type=float, default=120, help="for each line that is printed")
    options = parser.parse_args(argv)
    platform = current_platform()
    if platform not in ("gpu", "tpu"):
        print(f"nothing to tune: the kernels with block sizes run on gpu and tpu, this is {platform}")
        return 1
    device = tuning.device_kind(platform)
    for dtype, head_dim, page_size in itertools.product(options.dtype, options.head_dim, options.page_size):
        make = partial(problem, head_dim, page_size, dtype, context=options.context)
        decodes = [make(rows=rows, chunks=0, chunk=0) for rows in options.rows]
        prefills = [make(rows=0, chunks=2, chunk=options.chunk)]
        key = tuning.Key(device, dtype, head_dim, page_size)
        q_dtype = decodes[0][0].q.dtype
        if platform == "tpu":
            rule: Any = tuning.tpu_rule(dtype, head_dim, page_size, KV_HEADS * GROUP, KV_HEADS)
            searches: list[tuple[str, Any, str, Any, Choices, Any]] = [
                ("TPU", tpu.attention, "config", rule, TPU, decodes + prefills)
            ]
        else:
            decode_rule = tuning.gpu_decode_rule(dtype, head_dim)
            rule = tuning.gpu_prefill_rule(q_dtype, head_dim, options.chunk * GROUP)
            searches = [
                ("GPU_DECODE", gpu.attention, "decode_config", decode_rule, DECODE, decodes),
                ("GPU_PREFILL", gpu.attention, "prefill_config", rule, PREFILL, prefills),
            ]
            # The better of this and the line before is the implementation to choose for prefill.
            reason = mosaic.supports(AttentionCall.of(*prefills[0], platform))
            rule = tuning.gpu_mosaic_prefill_rule(head_dim)
            if reason is None:
                searches.append(
                    ("GPU_MOSAIC_PREFILL", mosaic.attention, "prefill_config", rule, MOSAIC_PREFILL, prefills)
                )
            else:
                print(f"GPU_MOSAIC_PREFILL: {key}: {reason}", file=sys.stderr)
        for name, attention, option, start, choices, problems in searches:
            measure = partial(timed, attention, option, problems)
            result = best(measure, start, choices, budget=options.seconds)
            if result is not None:
                config, times = result
                milliseconds = ", ".join(f"{1e3 * value:.3f}" for value in times)
                print(f"{name}: {key}: {config},  # ms: {milliseconds}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
