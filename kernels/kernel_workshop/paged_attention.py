"""The speed of paged attention, compared with the device's memory and products and with JAX's own attention."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rekindle_kernels import deprecated
from rekindle_kernels.native.cpu import usable_cores
from rekindle_kernels.ops.attention import AttentionInputs, AttentionOptions, paged_attention
from rekindle_kernels.ops.memory import init_pages
from rekindle_kernels.ops.registry import current_platform
from rekindle_kernels.pages import LayerKV, write_kv


@dataclass(frozen=True, slots=True)
class Sizes:
    """Decode: `rows` sequences of `context` keys. Prefill: one chunk of `chunk` queries that ends at `context`."""

    rows: int = 8
    context: int = 2048
    chunk: int = 512
    heads: int = 15
    kv_heads: int = 5
    head_dim: int = 64
    page_size: int = 64
    layers: int = 8  # decode reads this many caches in turn, so that none of them stays in a processor cache


@dataclass(frozen=True, slots=True)
class Line:
    """One measured row of the table."""

    name: str
    milliseconds: float  # median, one layer
    rate: float
    unit: str  # "GB/s" of keys and values read, or "GFLOP/s"
    share: float | None  # of the device's own rate


@deprecated.known()
def medians(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each run, taken in turns so that a change of the machine's pace affects all."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run())
    for _ in range(repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def read_bandwidth() -> float:
    """Return the bytes per second that this device reads from memory."""
    if current_platform() != "cpu":
        x = jnp.ones(2**27)
        copy = jax.jit(lambda x: x + 1)
        return 2 * x.nbytes / medians({"copy": lambda: copy(x)}, 20)["copy"]
    threads = usable_cores()
    parts = [np.ones(2**24, np.float32) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        run = lambda: list(pool.map(np.max, parts))  # noqa: E731
        return sum(part.nbytes for part in parts) / medians({"read": run}, 15)["read"]


def matmul_rate(dtype: str) -> float:
    """Return the operations per second of one large product that is accumulated in float32."""
    size = 1536 if current_platform() == "cpu" else 8192
    a = jnp.ones((size, size), dtype)
    run = jax.jit(lambda a, b: jnp.einsum("mk,nk->mn", a, b, preferred_element_type=jnp.float32))
    return 2 * size**3 / medians({"matmul": lambda: run(a, a)}, 10)["matmul"]


@deprecated.known()
def filled(shape: Sizes, rows: int, dtype: str, seed: int) -> LayerKV:
    """Return pages of `rows` full sequences, in order of their ids."""
    tokens = rows * shape.context
    random = np.random.default_rng(seed)
    kv = init_pages(tokens // shape.page_size + 1, shape.kv_heads, shape.page_size, shape.head_dim, dtype)
    positions = jnp.arange(tokens)
    k, v = jnp.asarray(random.standard_normal((2, tokens, shape.kv_heads, shape.head_dim), dtype=np.float32))
    return jax.jit(write_kv)(kv, k, v, 1 + positions // shape.page_size, positions % shape.page_size)


def table(shape: Sizes, rows: int, widen: int = 1) -> jax.Array:
    """Return a shuffled page table, `widen` times as wide as the context needs."""
    width = shape.context // shape.page_size
    ids = 1 + np.random.default_rng(0).permutation(rows * width).reshape(rows, width)
    return jnp.asarray(np.pad(ids, ((0, 0), (0, (widen - 1) * width))), jnp.int32)


def decode_lines(shape: Sizes, dtypes: tuple[str, ...], repeats: int, implementation: str | None) -> list[Line]:
    """Measure decode over pages of each dtype, the same with a table twice as wide, and dense attention."""
    runs: dict[str, Callable[[], Any]] = {}
    sizes: dict[str, float] = {}
    rows, context, heads = shape.rows, shape.context, shape.kv_heads
    q = jnp.asarray(np.random.default_rng(1).standard_normal((rows, shape.heads, shape.head_dim)), jnp.float32)
    lens = jnp.full((rows,), context, jnp.int32)
    options = AttentionOptions(decode_rows=rows, scale=shape.head_dim**-0.5)
    step = jax.jit(partial(paged_attention, options=options, implementation=implementation))
    for dtype in dtypes:
        layers = [filled(shape, rows, dtype, seed) for seed in range(shape.layers)]
        for widen in (1, 2):
            name = f"decode {dtype}" + (", table twice as wide" if widen == 2 else "")
            rest = (table(shape, rows, widen), lens, jnp.zeros(1, jnp.int32), jnp.int32(0))
            inputs = [AttentionInputs(q, kv, *rest) for kv in layers]
            runs[name] = partial(lambda inputs: [step(each) for each in inputs], inputs)
            sizes[name] = 2 * rows * context * heads * shape.head_dim * layers[0].dtype.itemsize
    dense = [jnp.full((rows, context, heads, shape.head_dim), seed, jnp.float32) for seed in range(shape.layers)]
    rival = jax.jit(jax.nn.dot_product_attention)
    runs["jax.nn.dot_product_attention float32, dense"] = lambda: [rival(q[:, None], x, x) for x in dense]
    sizes["jax.nn.dot_product_attention float32, dense"] = 2 * dense[0].nbytes
    roof = read_bandwidth()
    times = medians(runs, repeats)
    return [
        Line(name, seconds / shape.layers * 1e3, rate / 1e9, "GB/s", rate / roof)
        for name, seconds in times.items()
        for rate in [sizes[name] * shape.layers / seconds]
    ]


def prefill_lines(shape: Sizes, dtypes: tuple[str, ...], repeats: int, implementation: str | None) -> list[Line]:
    """Measure one chunk at the end of the context, and dense attention with the same mask."""
    chunk, context = shape.chunk, shape.context
    q = jnp.asarray(np.random.default_rng(1).standard_normal((chunk, shape.heads, shape.head_dim)), jnp.float32)
    options = AttentionOptions(decode_rows=0, scale=shape.head_dim**-0.5)
    step = jax.jit(partial(paged_attention, options=options, implementation=implementation))
    rest = (table(shape, 1), jnp.full((1,), context, jnp.int32), jnp.asarray([0, chunk], jnp.int32), jnp.int32(1))
    runs: dict[str, Callable[[], Any]] = {
        f"prefill {dtype}": partial(step, AttentionInputs(q, filled(shape, 1, dtype, 0), *rest)) for dtype in dtypes
    }
    dense = jnp.ones((1, context, shape.kv_heads, shape.head_dim))
    mask = jnp.arange(context) <= (context - chunk + jnp.arange(chunk))[:, None]
    rival = jax.jit(partial(jax.nn.dot_product_attention, mask=mask[None, None]))
    runs["jax.nn.dot_product_attention float32, dense"] = lambda: rival(q[None], dense, dense)
    work = 4 * shape.heads * shape.head_dim * (chunk * (context - chunk) + chunk * (chunk + 1) / 2)
    roofs = {dtype: matmul_rate("float32" if dtype == "float32" else "bfloat16") for dtype in (*dtypes, "float32")}
    times = medians(runs, repeats)
    lines = []
    for name, seconds in times.items():
        dtype = next(dtype for dtype in roofs if dtype in name)
        rate = work / seconds
        lines.append(Line(name, seconds * 1e3, rate / 1e9, "GFLOP/s", rate / roofs[dtype]))
    lines += [Line(f"matmul {dtype}", 0, roofs[dtype] / 1e9, "GFLOP/s", 1) for dtype in ("float32",)]
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kernel_workshop.paged_attention", description=__doc__)
    for field, value in asdict(Sizes()).items():
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--dtypes", default="float32,bfloat16,int8", help="of the pages")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--implementation", default=None)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = vars(parser.parse_args(arguments))
    dtypes = tuple(options.pop("dtypes").split(","))
    repeats, implementation, as_json = (options.pop(name) for name in ("repeats", "implementation", "json"))
    shape = Sizes(**options)
    if shape.context % shape.page_size or shape.chunk > shape.context:
        parser.error(f"context {shape.context} must be a multiple of page size {shape.page_size} and hold the chunk")
    device = jax.devices()[0]
    lines = [
        *decode_lines(shape, dtypes, repeats, implementation),
        Line("memory read", 0, read_bandwidth() / 1e9, "GB/s", 1),
        *prefill_lines(shape, dtypes, repeats, implementation),
    ]
    if as_json:
        print(json.dumps({"device": device.device_kind, "shape": asdict(shape), "lines": [asdict(x) for x in lines]}))
        return
    print(f"{device.platform} {device.device_kind}: {shape}")
    for line in lines:
        print(f"{line.name:48s}{line.milliseconds:10.3f} ms{line.rate:10.1f} {line.unit:8s}{line.share or 0:7.0%}")
