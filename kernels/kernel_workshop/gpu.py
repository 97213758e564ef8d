"""`python -m kernel_workshop.gpu [--mosaic]`: check the GPU kernels, then time them against cuDNN and JAX's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kernel_workshop.paged_attention import Sizes, filled, matmul_rate, medians, read_bandwidth, table
from rekindle_kernels import deprecated, pages, tuning
from rekindle_kernels.ops.attention import AttentionInputs, AttentionOptions, paged_attention
from rekindle_kernels.ops.registry import current_platform
from rekindle_kernels.pallas.gpu import attention as gpu_attention
from rekindle_kernels.pallas.gpu import mosaic

# The shapes of the benchmark: 64 rows of 4096 keys with groups of 8, and prompts of 2048 tokens.
DECODE = Sizes(rows=64, context=4096, heads=64, kv_heads=8, head_dim=128, page_size=16, layers=1)
PREFILL = replace(DECODE, rows=4, context=2048, chunk=2048, heads=32)
Runs = dict[str, Callable[[], Any]]


@deprecated.known()
def guarded(runs: Runs) -> Runs:
    """Return the runs that succeed on this device. Print the error of each of the others."""
    working: Runs = {}
    for name, run in runs.items():
        try:
            jax.block_until_ready(run())
            working[name] = run
        except Exception as error:
            print(f"{name}: {str(error).splitlines()[0][:150]}")
    return working


def decode_runs(shape: Sizes) -> Runs:
    rows, context, scale = shape.rows, shape.context, shape.head_dim**-0.5
    options = AttentionOptions(decode_rows=rows, scale=scale)
    kv = filled(shape, rows, "bfloat16", 0)
    q = jax.random.normal(jax.random.key(1), (rows, shape.heads, shape.head_dim), jnp.bfloat16)
    lens = jnp.full((rows,), context, jnp.int32)
    rest = (lens, jnp.zeros(1, jnp.int32), jnp.int32(0))
    paged = jax.jit(partial(paged_attention, options=options))
    runs: Runs = {
        name: partial(paged, AttentionInputs(q, kv, table(shape, rows, widen), *rest))
        for name, widen in (("decode", 1), ("decode, table twice as wide", 2))
    }
    for extra in (0, 33, 66, 132):
        run = jax.jit(partial(gpu_attention.attention, options=options, extra=extra))
        runs[f"decode, {rows} + {extra} items"] = partial(run, AttentionInputs(q, kv, table(shape, rows), *rest))
    # Most rows are short: GB/s are those of the whole pages, so compare these two only with each other.
    uneven = jnp.full((rows,), 64, jnp.int32).at[0].set(context)
    for extra in (0, 33):
        run = jax.jit(partial(gpu_attention.attention, options=options, extra=extra))
        inputs = AttentionInputs(q, kv, table(shape, rows), uneven, *rest[1:])
        runs[f"decode, one long row, {rows} + {extra} items"] = partial(run, inputs)
    scaled = q * scale
    k, v = (kv.pages[:, half].swapaxes(0, 1) for half in (0, 1))
    pages_of = table(shape, rows)
    runs["jax pallas paged_attention"] = lambda: deprecated.jax_paged_attention()(scaled, k, v, pages_of, lens)
    dense = jnp.ones((rows, context, shape.kv_heads, shape.head_dim), jnp.bfloat16)
    for name in ("cudnn", "xla"):
        attend = jax.jit(partial(jax.nn.dot_product_attention, implementation=name))
        runs[f"jax.nn.dot_product_attention {name}, dense"] = partial(attend, q[:, None], dense, dense)
    return runs


def prefill_runs(shape: Sizes, *, with_mosaic: bool = False) -> Runs:
    rows, chunk = shape.rows, shape.chunk
    kv = filled(shape, rows, "bfloat16", 0)
    q = jax.random.normal(jax.random.key(1), (rows * chunk, shape.heads, shape.head_dim), jnp.bfloat16)
    starts = jnp.arange(rows + 1, dtype=jnp.int32) * chunk
    lens = jnp.full((rows,), shape.context, jnp.int32)
    options = AttentionOptions(decode_rows=0, scale=shape.head_dim**-0.5)
    paged = jax.jit(partial(paged_attention, options=options))
    inputs = AttentionInputs(q, kv, table(shape, rows), lens, starts, jnp.int32(rows))
    runs: Runs = {"prefill": partial(paged, inputs)}
    for block_k, stages in ((64, 3), (64, 4), (128, 2)) if with_mosaic else ():
        config = tuning.GpuMosaicPrefill(block_k, stages)
        run = jax.jit(partial(mosaic.attention, options=options, prefill_config=config))
        runs[f"prefill, Mosaic GPU, {stages} blocks of {block_k} keys"] = partial(run, inputs)
    dense = jnp.ones((rows, chunk, shape.kv_heads, shape.head_dim), jnp.bfloat16)
    for name in ("cudnn", "xla"):
        attend = jax.jit(partial(jax.nn.dot_product_attention, is_causal=True, implementation=name))
        runs[f"jax.nn.dot_product_attention {name}, dense"] = partial(
            attend, q.reshape(rows, chunk, *q.shape[1:]), dense, dense
        )
    return runs


def write_runs(shape: Sizes, tokens: int) -> Runs:
    """Return runs that write keys and values. Both copy the pages, since nothing is donated: only compare them."""
    kv = filled(shape, 1, "bfloat16", 0)
    values = jax.random.normal(jax.random.key(1), (tokens, shape.kv_heads, shape.head_dim), jnp.bfloat16)
    positions = jnp.arange(tokens)
    rest = (values, values, 1 + positions // shape.page_size, positions % shape.page_size)
    kernels: dict[str, Callable[..., Any]] = {"scatter": pages.write_kv, "kernel": gpu_attention.write_kv}
    return {f"write {tokens} tokens, {name}": partial(jax.jit(write), kv, *rest) for name, write in kernels.items()}


@deprecated.known()
def check(implementation: str | None = None) -> None:
    """Raise if the compiled kernels disagree with the reference on a small mixed batch."""
    shape = replace(DECODE, context=512, chunk=200, heads=16, kv_heads=2)
    kv = filled(shape, 3, "bfloat16", 0)
    q = jax.random.normal(jax.random.key(1), (2 + shape.chunk, shape.heads, shape.head_dim), jnp.bfloat16)
    lens, starts = jnp.array([1, 500, 512], jnp.int32), jnp.array([0, shape.chunk], jnp.int32)
    inputs = AttentionInputs(q, kv, table(shape, 3), lens, starts, jnp.int32(1))
    run = partial(paged_attention, options=AttentionOptions(decode_rows=2, scale=shape.head_dim**-0.5))
    result = run(inputs, implementation=implementation)
    expected = run(replace(inputs, q=q.astype(jnp.float32)), implementation="reference")
    worst = float(jnp.max(jnp.abs(result.astype(jnp.float32) - expected)))
    assert worst < 3e-2, f"the compiled kernels are off by {worst}"


def main(argv: Sequence[str] = ()) -> int:
    """Measure all; with `--mosaic` prefill alone, by both kernels, so that a hang loses no other figures."""
    with_mosaic = "--mosaic" in argv
    if current_platform() != "gpu":
        print(f"needs a GPU, this is {current_platform()}; kernel_workshop.paged_attention measures anywhere")
        return 1
    check("pallas_mosaic_gpu" if with_mosaic else None)
    copy, matmul = read_bandwidth(), matmul_rate("bfloat16")
    size = 2 * 2 * DECODE.rows * DECODE.context * DECODE.kv_heads * DECODE.head_dim
    for name, seconds in medians(guarded({} if with_mosaic else decode_runs(DECODE)), 30).items():
        print(f"{name:48s}{1e3 * seconds:10.3f} ms{size / seconds / 1e9:10.1f} GB/s   {size / seconds / copy:6.0%}")
    work = 2 * PREFILL.rows * PREFILL.heads * PREFILL.head_dim * PREFILL.chunk * (PREFILL.chunk + 1)
    for name, seconds in medians(guarded(prefill_runs(PREFILL, with_mosaic=with_mosaic)), 30).items():
        print(f"{name:48s}{1e3 * seconds:10.3f} ms{work / seconds / 1e12:10.1f} TFLOP/s{work / seconds / matmul:6.0%}")
    for tokens in () if with_mosaic else (64, 2048):
        for name, seconds in medians(guarded(write_runs(DECODE, tokens)), 30).items():
            print(f"{name:48s}{1e3 * seconds:10.3f} ms")
    print(f"copy {copy / 1e9:.0f} GB/s, matmul {matmul / 1e12:.0f} TFLOP/s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
