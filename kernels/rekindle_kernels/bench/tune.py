"""`python -m rekindle_kernels.bench.tune` times block sizes on the device at hand and prints lines for `tuning.py`."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rekindle_kernels import deprecated, tuning
from rekindle_kernels.ops.attention import AttentionInputs, AttentionOptions
from rekindle_kernels.ops.memory import init_pages
from rekindle_kernels.ops.registry import current_platform
from rekindle_kernels.pages import LayerKV, needs_scales
from rekindle_kernels.pallas.gpu import attention as gpu
from rekindle_kernels.pallas.tpu import attention as tpu

GROUP, KV_HEADS = 4, 8


def gpu_decode_candidates() -> Iterable[tuning.GpuDecode]:
    for block_k, warps, stages, waves in itertools.product((16, 32, 64, 128), (2, 4, 8), (2, 3, 5), (1, 2, 4)):
        yield tuning.GpuDecode(block_k, warps, stages, waves)


def gpu_prefill_candidates() -> Iterable[tuning.GpuPrefill]:
    for block_m, block_k, warps, stages in itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3)):
        yield tuning.GpuPrefill(block_m, block_k, warps, stages)


def tpu_candidates() -> Iterable[tuning.Tpu]:
    for tokens, keys in itertools.product((16, 32, 64, 128), (128, 256, 512, 1024)):
        yield tuning.Tpu(tokens, keys)


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
    """`rows` decode rows and `chunks` prefill chunks of `chunk` tokens, all with `context` keys in shuffled pages."""
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
    """Median time of one call; several calls are in flight at once, so that dispatch is not what is measured."""
    jax.block_until_ready(run(inputs))
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready([run(inputs) for _ in range(calls)])
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def best(
    attention: Callable[..., jax.Array],
    option: str,
    candidates: Iterable[Any],
    problems: Sequence[tuple[AttentionInputs, AttentionOptions]],
) -> tuple[Any, list[float]] | None:
    """The candidate with the least product of times over the problems; those that don't compile are passed over."""
    found: list[tuple[float, Any, list[float]]] = []
    for candidate in candidates:
        try:
            times = [
                seconds(jax.jit(partial(attention, options=options, **{option: candidate})), inputs)
                for inputs, options in problems
            ]
        except Exception as error:
            print(f"  {candidate}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
            continue
        found.append((float(np.prod(times)), candidate, times))
    if not found:
        return None
    _, candidate, times = min(found, key=lambda entry: entry[0])
    return candidate, times


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rekindle_kernels.bench.tune", description=__doc__)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--page-size", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rows", nargs="+", type=int, default=[4, 64], help="decode batch sizes that count equally")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prefill chunk")
    options = parser.parse_args(argv)
    platform = current_platform()
    if platform not in ("gpu", "tpu"):
        print(f"nothing to tune: the kernels with block sizes run on gpu and tpu, this is {platform}")
        return 1
    attention = gpu.attention if platform == "gpu" else tpu.attention
    device = tuning.device_kind(platform)
    for dtype, head_dim, page_size in itertools.product(options.dtype, options.head_dim, options.page_size):
        make = partial(problem, head_dim, page_size, dtype, context=options.context)
        decodes = [make(rows=rows, chunks=0, chunk=0) for rows in options.rows]
        prefills = [make(rows=0, chunks=2, chunk=options.chunk)]
        key = tuning.Key(device, dtype, head_dim, page_size)
        searches = [
            ("GPU_DECODE", "decode_config", gpu_decode_candidates(), decodes),
            ("GPU_PREFILL", "prefill_config", gpu_prefill_candidates(), prefills),
        ]
        if platform == "tpu":
            searches = [("TPU", "config", tpu_candidates(), decodes + prefills)]
        for name, option, candidates, problems in searches:
            found = best(attention, option, candidates, problems)
            if found is not None:
                config, times = found
                milliseconds = ", ".join(f"{1e3 * value:.3f}" for value in times)
                print(f"{name}: {key}: {config},  # ms: {milliseconds}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
