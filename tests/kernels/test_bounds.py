"""Native kernels stay within their memory whatever page ids, lengths and counts they are given, in another process."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from helpers.python import run_python
from rekindle_kernels import AttentionInputs, AttentionOptions, init_pages
from rekindle_kernels.native import attention, build, products
from rekindle_kernels.native.kernel_table import MATVEC

needs_numba = pytest.mark.skipif(build.unavailable_reason() is not None, reason="numba is not installed")

COMMON = """
import sys
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from rekindle_kernels import AttentionInputs, AttentionOptions, Choice, init_pages
from rekindle_kernels.native import attention, chain, products, sampling

FAR = [2**20, -5, 2**31 - 1, -(2**31), 8, -1]
ints = lambda values: jnp.asarray(values, jnp.int32)
random = np.random.default_rng(0)
floats = lambda *shape: jnp.asarray(random.standard_normal(shape, np.float32))

def pages(dtype, count=8):
    return jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), init_pages(count, 2, 16, 64, dtype))

def attend(q, kv, table, lens, ends, prompts, rows):
    call = partial(attention.paged_attention, options=AttentionOptions(decode_rows=rows, scale=0.125))
    return jax.jit(call)(AttentionInputs(q, kv, table, lens, ends, prompts))
"""
CASES = {
    "write": """
for dtype in ("float32", "bfloat16", "int8-int4"):
    kv = pages(dtype)
    for far in FAR:
        for ids, offsets in (([far, 3], [0, 0]), ([3, 3], [far if far != 8 else 16, 0])):
            got = jax.jit(attention.write)(kv, floats(2, 2, 64), floats(2, 2, 64), ints(ids), ints(offsets))
            for new, old in zip(jax.tree.leaves(got), jax.tree.leaves(kv), strict=True):
                differs = (np.asarray(new) != np.asarray(old)).reshape(8, -1)
                assert set(np.flatnonzero(differs.any(axis=1))) <= {0, 3}, differs
""",
    "decode": """
for dtype in ("float32", "bfloat16", "int8", "int8-int4"):
    kv, q = pages(dtype), floats(3, 4, 64)
    run = lambda table, lens: np.asarray(attend(q, kv, ints(table), ints(lens), ints([0]), jnp.int32(0), 3))
    good = run([[1, 2], [3, 4], [5, 6]], [20, 32, 7])
    for far in FAR:
        table, lens = run([[1, 2], [3, far], [5, 6]], [20, 32, 7]), run([[1, 2], [3, 4], [5, 6]], [20, far, 7])
        np.testing.assert_array_equal(table[::2], good[::2])
        np.testing.assert_array_equal(lens[::2], good[::2])
""",
    "prefill": """
for dtype in ("float32", "bfloat16", "int8", "int8-int4"):
    kv, q = pages(dtype), floats(40, 4, 64)
    table = ints([[1, 2], [3, 4], [5, 6]])
    run = lambda lens, ends, count, table=table: np.asarray(
        attend(q, kv, table, ints(lens), ints(ends), ints(count), 0)
    )
    good = run([20, 12, 0], [0, 20, 32, 32], 2)
    for far in FAR:
        bad_table = run([20, 12, 0], [0, 20, 32, 32], 2, table.at[1, 0].set(far))
        np.testing.assert_array_equal(bad_table[:20], good[:20])
        np.testing.assert_array_equal(run([20, far, 0], [0, 20, 32, 32], 2)[:20], good[:20])
        run([20, 12, 0], [0, 20, far, 32], 3)
        run([20, 12, 0], [far, 20, 32, 32], 2)
        run([20, 12, 0], [0, 20, 32, 32], far)
""",
    "products": """
for dtype in ("float32", "bfloat16", "int8"):
    for rows in (3, 40, 300):
        weight = (floats(96, 128) * 40).astype(dtype)
        if products.multiplies(rows, weight, quantize_rows=True):
            product = jax.jit(partial(products.multiply, quantize_rows=True))
            for far in FAR:
                product(floats(rows, 128), weight, count=jnp.int32(far)).block_until_ready()
                product(floats(rows, 128), jnp.stack([weight] * 2), expert=jnp.int32(far)).block_until_ready()
""",
    "int4": """
for rows in (3, 40, 300):
    for blocks in (1, 6, 7):
        weight = jnp.asarray(random.integers(0, 256, (blocks, 1024)), jnp.uint8)
        scale = floats(blocks, 64).astype(jnp.float16)
        for far in FAR:
            product = jax.jit(products.multiply_int4)
            product(floats(rows, 128), weight, scale, count=jnp.int32(far)).block_until_ready()
            stacks = jnp.stack([weight] * 2), jnp.stack([scale] * 2)
            product(floats(rows, 128), *stacks, expert=jnp.int32(far)).block_until_ready()
        weight = jnp.asarray(random.integers(0, 2**32, (blocks, 768)), jnp.uint32)
        scale = jnp.asarray(random.integers(-9, 9, (blocks, 288)), jnp.int8)
        for far in FAR:
            product(floats(rows, 256), weight, scale, count=jnp.int32(far)).block_until_ready()
""",
    "adapters": """
from rekindle_kernels.native.products import add_adapters
calls = [jax.jit(partial(add_adapters, place=1, outputs=(32, 32), gated=gated)) for gated in (False, True)]
y, x, down, up = floats(7, 64), floats(7, 64), floats(64, 64), floats(32, 64)
for far in FAR:
    for owners, order, slots in (
        ([[far, 1]] * 2, [0, 1, 2, 3, 4, 5, 6], [far, 0, 1, 1, 1, 1, 1]),
        ([[1, far]] * 2, [far, 1, 2, far, 4, 5, 6], [1] * 7),
    ):
        for call in calls:
            for norm in (None, floats(64)):
                call(y, x, down, up, ints(owners), ints(order), ints(slots), norm).block_until_ready()
""",
    "recurrence": """
from rekindle_kernels.ops.recurrence import ConvolutionInputs, HeadInputs
from rekindle_kernels.native import recurrence
from rekindle_kernels.ops import recurrence as ops
options = ops.ConvolutionOptions(first=3, before=0, behind=1, silu=True)
delta, scan = ops.DeltaOptions(2, 1, 66, 68, 1e-6), ops.ScanOptions(1, 2)
weights, skip = ops.DeltaWeights(floats(2), floats(2), floats(32)), ops.ScanWeights(floats(2), floats(2), floats(2))
x, taps, tails, states = floats(9, 35), floats(32, 4), floats(3, 3, 32), floats(3, 2, 16, 32)
for far in FAR:
    for lens, ends, prompts, slots in (
        ([far] * 4, [0, 3, 7], 2, [0, 1, 2, 2]),
        ([5] * 4, [far, 3, 7], 2, [0, 1, 2, 2]),
        ([5] * 4, [0, far, far], 2, [0, 1, 2, 2]),
        ([5] * 4, [0, 3, 7], far, [0, 1, 2, 2]),
        ([5] * 4, [0, 3, 7], 2, [far] * 4),
    ):
        batch = ops.RaggedBatch(ints(lens), ints(ends), ints(prompts), 2, (ints(slots), ints(slots)))
        recurrence.convolve(ConvolutionInputs(x, taps, None, tails, batch), options)[0].block_until_ready()
        run, inputs = recurrence.gated_delta, HeadInputs(floats(9, 128), floats(9, 70), weights, states, batch)
        run(inputs, delta)[0].block_until_ready()
        run, inputs = recurrence.selective_scan, HeadInputs(floats(9, 96), floats(9, 4), skip, states, batch)
        run(inputs, scan)[0].block_until_ready()
""",
    "masks": """
draw = jax.jit(sampling.draw, static_argnums=2)
for width in (1, 33, 300, 5000):
    for far in FAR:
        row, seed, masks = jnp.ones(3), jnp.zeros((3, 2), jnp.uint32), jnp.full((3, -(-width // 32)), far, jnp.int32)
        for warm in (0 * row, row):
            choice = Choice(warm, ints([far] * 3), 0.9 * row, 0 * row, seed, ints([far] * 3))
            got = draw(floats(3, width), choice, 64, masks)
            assert ((np.asarray(got) >= 0) & (np.asarray(got) < width)).all(), got
""",
    "chain": """
def function(x, weight, kv, lens, ends, prompts, table):
    q = products.multiply(x, weight).reshape(-1, 4, 64)
    inputs = AttentionInputs(q, kv, table, lens, ends, prompts)
    y = attention.paged_attention(inputs, AttentionOptions(decode_rows=3, scale=1.0))
    return products.multiply(y.reshape(-1, 256), weight, residual=x)

step, x, weight, kv = jax.jit(chain.chained(function)), floats(40, 256), floats(256, 256), pages("bfloat16")
weight = weight.astype(jnp.bfloat16)
table = ints(np.arange(10).reshape(5, 2) % 8)
if products.multiplies(40, weight):
    assert "rekindle_chain" in step.lower(x, weight, kv, ints([1] * 5), ints([0, 9, 9]), ints(1), table).as_text()
    for far in FAR:
        for lens, ends, prompts in (([far] * 5, [0, 9, 9], 1), ([1] * 5, [0, far, far], 2), ([1] * 5, [0, 9, 9], far)):
            step(x, weight, kv, ints(lens), ints(ends), ints(prompts), table.at[2, 1].set(far)).block_until_ready()
""",
}


@needs_numba
@pytest.mark.slow
def test_nothing_outside_is_read_or_written() -> None:
    """The last name on stderr is that of the kernel which ended the process."""
    named = (f"print({name!r}, file=sys.stderr, flush=True)\n{code}" for name, code in CASES.items())
    run_python("-c", "\n".join((COMMON, *named)), MALLOC_PERTURB_="165")


def attend(rows: int, heads: int) -> jax.Array:
    kv = init_pages(4, 2, 16, 16, "float32")
    ints = jnp.zeros((2,), jnp.int32)
    table, q = jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, heads, 16))
    return attention.paged_attention(
        AttentionInputs(q, kv, table, ints, ints, ints[0]), AttentionOptions(decode_rows=rows, scale=1.0)
    )


@needs_numba
def test_shapes_that_do_not_fit_are_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="3 decode rows of 2 tokens"):
        attend(3, 4)
    with pytest.raises(ValueError, match="3 query heads of 2 kv heads"):
        attend(2, 3)
    x, weight = jnp.ones((2, 64)), jnp.ones((32, 48))
    with pytest.raises(ValueError, match=r"operand x of kernel matvec_float32 has 64 where axis K has 48"):
        products.multiply(x, weight)
    with pytest.raises(ValueError, match=r"operand residual .* has shape \[64\]: its axes are \[T, M\]"):
        products.multiply(x, jnp.ones((64, 64)), residual=jnp.ones((64,)))
    with pytest.raises(ValueError, match="can't be split into 4 heads"):
        attention.split(jnp.ones((2, 4, 32)), jnp.ones((2, 8, 32)), jnp.ones((2, 16)), jnp.ones((2, 16)), heads=4)
    with pytest.raises(ValueError, match="is float16: pass it as int32"):
        products.call(
            MATVEC.variant("float32"),
            {"weight": weight, "x": jnp.ones((2, 48)), "rows": jnp.ones((2,), jnp.float16)},
            {"eps": 0, "gated": 0},
            {"M": 32},
        )
