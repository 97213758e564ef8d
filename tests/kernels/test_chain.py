"""Chains: what becomes one call, what stays apart, and that the results are those of the single calls."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.python import run_python
from helpers.thorough import by_default
from rekindle_kernels import AttentionInputs, AttentionOptions, init_pages
from rekindle_kernels.native import attention, build, calling, chain, chain_plan, products
from rekindle_kernels.native.chain_plan import Buffer
from rekindle_kernels.native.kernel_table import GEMM

needs_numba = pytest.mark.skipif(build.unavailable_reason() is not None, reason="numba is not installed")
E = 64
RANDOM = np.random.default_rng(0)


def rows(count: int = 3) -> jax.Array:
    return jnp.asarray(RANDOM.standard_normal((count, E), np.float32))


def matrix(height: int = E) -> jax.Array:
    return jnp.asarray(RANDOM.standard_normal((height, E), np.float32) / 8)


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return calling.differentiable(partial(products.rms_norm, eps=1e-5), lambda x, weight: x * weight)(x, weight)


def pages_of(size: int, *, count: int) -> Any:
    """Of two heads of 16, with something in them."""
    empty = init_pages(count, 2, size, 16, "float32")
    return jax.tree.map(lambda leaf: jnp.asarray(RANDOM.standard_normal(leaf.shape, np.float32)), empty)


def calls(function: Callable[..., Any], *args: Any) -> list[str]:
    """The native calls of a function's program, in their order."""
    equations = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return [
        eqn.params["target_name"].removeprefix("rekindle_") for eqn in equations if eqn.primitive.name == "ffi_call"
    ]


def same(function: Callable[..., Any], *args: Any) -> None:
    alone, together = jax.jit(function)(*args), jax.jit(chain.chained(function))(*args)
    assert jax.tree.structure(alone) == jax.tree.structure(together)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def layers(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
    for weight in weights:
        x = products.multiply(norm(x, weight[0]), weight, residual=x)
    return x


@needs_numba
def test_a_run_becomes_one_call() -> None:
    weights = [matrix() for _ in range(5)]
    assert calls(chain.chained(layers), rows(), weights) == ["chain"]
    same(layers, rows(), weights)


@needs_numba
def test_other_operations_end_a_run_only_if_they_need_its_results() -> None:
    def function(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        a = products.multiply(norm(x, weight[0]), weight)
        beside = jnp.tanh(x)  # needs nothing of the run, and the run goes on
        b = products.multiply(a, weight, residual=beside)
        c = jnp.tanh(b)
        d = products.multiply(norm(c, weight[1]), weight)
        return jnp.sin(d) + a, b

    assert calls(chain.chained(function), rows(), matrix()) == ["chain", "chain"]
    same(function, rows(), matrix())


@needs_numba
def test_a_run_in_the_body_of_a_loop_becomes_one_call() -> None:
    weights = jnp.stack([matrix() for _ in range(3)])

    def function(x: jax.Array, weights: jax.Array, count: jax.Array) -> jax.Array:
        def body(index: jax.Array, x: jax.Array) -> jax.Array:
            x = products.multiply(norm(x, weights[0, 0]), weights, expert=index)
            return products.multiply(x, weights, residual=x, expert=index) / 8

        return jax.lax.fori_loop(0, count, body, x)

    arguments = rows(), weights, jnp.int32(3)
    same(function, *arguments)
    (loop,) = [eqn for eqn in jax.make_jaxpr(chain.chained(function))(*arguments).eqns if eqn.primitive.name == "while"]
    assert calls(jax.extend.core.jaxpr_as_fun(loop.params["body_jaxpr"]), *loop.params["body_jaxpr"].in_avals) == [
        "chain"
    ]


def test_a_loop_without_native_calls_is_not_traced_again() -> None:
    def body(index: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(index > 1, x * 2, x)

    looped = lambda x: jax.lax.fori_loop(0, jnp.int32(3), body, x)  # noqa: E731
    (loop,) = [eqn for eqn in jax.make_jaxpr(looped)(jnp.ones(4)).eqns if eqn.primitive.name == "while"]
    assert chain._with_joined_body(loop) is loop
    assert jax.jit(chain.chained(looped))(jnp.ones(4)).tolist() == [2.0] * 4


@needs_numba
def test_a_single_call_stays_one() -> None:
    assert calls(chain.chained(products.multiply), rows(), matrix()) == ["matvec_float32"]


@needs_numba
def test_other_shapes_of_the_same_memory_go_in_and_come_out() -> None:
    def function(x: jax.Array, weight: jax.Array, cos: jax.Array) -> tuple[jax.Array, ...]:
        qkv = products.multiply(x, weight).reshape(-1, 6, 32)
        q, k, v = attention.split(qkv, qkv, cos, cos, heads=2)
        again = products.multiply(q.reshape(-1, E), weight)
        return again.reshape(-1, 2, 3, 32), k, k.reshape(-1, E).reshape(-1), v

    x, weight, cos = rows(), matrix(3 * E), jnp.asarray(RANDOM.random((3, 16), np.float32))
    assert calls(chain.chained(function), x, weight, cos) == ["chain"]
    same(function, x, weight, cos)


@needs_numba
def test_pages_are_written_in_place() -> None:
    kv = init_pages(64, 2, 16, 32, "float32")

    def function(pages: jax.Array, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        layer, ids = type(kv)(pages), jnp.arange(3, dtype=jnp.int32)
        for _ in range(2):
            k = products.multiply(x, weight).reshape(-1, 2, 32)
            layer = attention.write(layer, k, k, ids, ids)
            ids, x = ids + 1, x * 2
        return layer.pages, x

    args = kv.pages, rows(), matrix()
    assert calls(chain.chained(function), *args) == ["chain"]
    same(function, *args)
    compiled = jax.jit(chain.chained(function), donate_argnums=0).lower(*args).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= kv.pages.nbytes
    assert "copy(" not in "".join(line for line in compiled.as_text().splitlines() if "f32[64,2,2,16,32]" in line)


@needs_numba
def test_memory_that_is_read_again_is_not_written_in_place() -> None:
    kv = init_pages(8, 2, 16, 32, "float32")

    def function(pages: jax.Array, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        k = products.multiply(norm(x, weight[0]), weight).reshape(-1, 2, 32)
        ids = jnp.arange(3, dtype=jnp.int32)
        return attention.write(type(kv)(pages), k, k, ids, ids).pages, pages

    same(function, kv.pages, rows(), matrix())


@needs_numba
def test_neither_is_memory_that_is_read_again_under_another_shape() -> None:
    kv = init_pages(1, 1, 16, 16, "float32")

    def function(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        flat = products.multiply(norm(x, weight[0]), weight)  # as large as the page
        ids, k = jnp.zeros(3, jnp.int32), x[:3, :16].reshape(3, 1, 16)
        page = attention.write(type(kv)(flat.reshape(kv.pages.shape)), k, k, ids, ids + 5).pages
        return page, products.multiply(norm(flat, weight[1]), weight)

    same(function, rows(8), matrix())


@needs_numba
def test_equal_constants_are_one_operand() -> None:
    weights = [matrix() for _ in range(5)]
    equations = jax.make_jaxpr(chain.chained(layers))(rows(), weights).jaxpr.eqns
    found = next(eqn for eqn in equations if eqn.primitive.name == "ffi_call")
    # The plan, x, five matrices, their five rows that norm, and the constants: no scale or norm, two epsilons, rows.
    assert len(found.invars) <= 1 + 1 + 10 + 4


@needs_numba
def test_branches_and_their_native_calls_are_left_alone() -> None:
    def function(x: jax.Array, weight: jax.Array, flag: jax.Array) -> jax.Array:
        x = products.multiply(norm(x, weight[0]), weight)
        return jax.lax.cond(flag, lambda: products.multiply(x, weight), lambda: x)

    for flag in (True, False):
        same(function, rows(), matrix(), jnp.asarray(flag))


@needs_numba
@pytest.mark.parametrize("count", by_default([1, 70, 2, pytest.param(16, marks=pytest.mark.slow)], 2))
@pytest.mark.parametrize("dtype", by_default(["int8", "float32", "bfloat16"]))
def test_many_chains_at_once_give_what_one_gives(dtype: str, count: int) -> None:
    weights = [matrix(256), matrix(256)]
    scales = None if dtype != "int8" else jnp.ones((256,), jnp.float32) / 100
    weights = [(weight * (1 if scales is None else 100)).astype(dtype) for weight in weights]
    if not products.multiplies(count, weights[0], quantize_rows=True):
        pytest.skip("XLA's")

    table = jnp.ones((count, 16))

    def function(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        for _ in range(6):
            y = products.multiply(x, first, scales, quantize_rows=True).reshape(-1, 4, E)
            q, _, _ = attention.split(y, y, table, table, heads=2)
            x = products.multiply(q.reshape(-1, 2 * E)[:, :E], second, scales, quantize_rows=True)[:, :E]
        return x

    x = rows(count)
    same(function, x, *weights)
    compiled = jax.jit(chain.chained(function)).lower(x, *weights).compile()
    expected = np.asarray(compiled(x, *weights))
    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(lambda _: np.asarray(compiled(x, *weights)), range(60)):
            np.testing.assert_array_equal(got, expected)


@needs_numba
@needs_numba
def test_no_derivatives_are_traced_for_a_program_and_others_still_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    custom = jax.custom_jvp
    monkeypatch.setattr(jax, "custom_jvp", lambda function: made.append(function) or custom(function))
    x, weight = rows(), jnp.ones((E,), jnp.float32)
    jax.make_jaxpr(chain.chained(lambda x: norm(norm(x, weight), weight)))(x)
    assert not made, "a rule for derivatives takes longer to trace than the call itself"
    gradient = jax.grad(lambda x: norm(x, weight).sum())(x)
    assert len(made) == 1
    np.testing.assert_array_equal(gradient, np.ones_like(x), "of the plain form")


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_CHAIN", "0")
    assert chain.chained(layers) is layers


@needs_numba
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system can't bind processes to a core")
def test_one_thread_is_enough() -> None:
    bound = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    here = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})"
    run_python("-c", f"{bound}; {here}; import test_chain; test_chain.test_a_run_becomes_one_call()")


@needs_numba
@pytest.mark.parametrize("lengths", by_default([((1,),), ((3, 20),), ((5,),), ((30,),)], 2))
def test_tokens_behind_the_prompts_are_not_computed(lengths: tuple[int, ...]) -> None:
    others, tokens, size = 2, 30, 16
    kv = pages_of(size, count=8)
    ends = np.zeros(4, np.int32)
    ends[1:] = np.pad(np.cumsum(lengths), (0, 3 - len(lengths)), mode="edge")
    lens = jnp.asarray([1, 1, *lengths, *[0] * (3 - len(lengths))], jnp.int32)
    table = jnp.arange(5, dtype=jnp.int32)[:, None] + jnp.zeros((1, 2), jnp.int32)

    def function(
        x: jax.Array, weight: jax.Array, ends: jax.Array, prompts: jax.Array, count: jax.Array | None = None
    ) -> jax.Array:
        q = products.multiply(norm(x, weight[0]), weight, count=count).reshape(-1, 4, 16)
        y = attention.paged_attention(
            AttentionInputs(q, kv, table, lens, ends, prompts), AttentionOptions(decode_rows=others, scale=1.0)
        )
        return products.multiply(y.reshape(-1, E), weight, residual=x, count=count)

    weight = matrix().astype(jnp.bfloat16)
    if not products.multiplies(others + tokens, weight):
        pytest.skip("XLA multiplies so many rows")
    args = rows(others + tokens), weight, jnp.asarray(ends), jnp.asarray(len(lengths), jnp.int32)
    assert calls(chain.chained(function), *args) == ["chain"]
    constants = jax.make_jaxpr(chain.chained(function))(*args).consts
    assert any((np.asarray(constant) == chain_plan.ROWS).any() for constant in constants), "every row is computed"
    used = others + sum(lengths)
    # As few rows are multiplied alone as in the chain, or sums would be made in another order.
    alone, together = jax.jit(function)(*args, jnp.asarray(used, jnp.int32)), jax.jit(chain.chained(function))(*args)
    np.testing.assert_array_equal(np.asarray(alone)[:used], np.asarray(together)[:used])


@needs_numba
@pytest.mark.parametrize("dtype", by_default(["float32", "bfloat16", "int8"]))
@pytest.mark.parametrize(
    ("decode", "lengths", "padding"),
    by_default([
        ([3] * 5 + [0] * 15, (3, 20), 7), ([0] * 8, (30,), 0), ([3] * 7 + [0] * 5, (), 0), ([0] * 16, (), 0),
        ([4, 0, 9, 0, 1, 0, 0, 0], (12,), 2), ([2] * 16, (5,), 3), ([5, 0, 0], (), 0), ([7] * 9 + [0] * 23, (180,), 7),
        ([5, 0, 0], (1,), 1),
    ], 5),
)  # fmt: skip
def test_rows_of_nobody_are_not_multiplied(
    dtype: str, decode: list[int], lengths: tuple[int, ...], padding: int
) -> None:
    others, own = len(decode), max((row + 1 for row, length in enumerate(decode) if length), default=0)
    kv, tokens = pages_of(16, count=40), sum(lengths) + padding
    ends = jnp.asarray(np.pad(np.cumsum((0, *lengths)), (0, 2 - len(lengths)), mode="edge"), jnp.int32)
    lens = jnp.asarray([*decode, *lengths, *[0] * (2 - len(lengths))], jnp.int32)
    table = jnp.arange(others + 2, dtype=jnp.int32)[:, None] % 40 + jnp.zeros((1, 16), jnp.int32)
    scales = jnp.ones((E,), jnp.float32) / 100 if dtype == "int8" else None

    def function(x: jax.Array, weight: jax.Array, lens: jax.Array, ends: jax.Array, count: jax.Array) -> Any:
        q = products.multiply(x, weight, scales, norm=weight[0].astype(jnp.float32), quantize_rows=True)
        y = attention.paged_attention(
            AttentionInputs(q.reshape(-1, 4, 16), kv, table, lens, ends, count),
            AttentionOptions(decode_rows=others, scale=1.0),
        )
        return q, products.multiply(y.reshape(-1, E), weight, scales, x, quantize_rows=True)

    weight = (matrix() * (100 if dtype == "int8" else 1)).astype(dtype)
    if not products.multiplies(others + tokens, weight, quantize_rows=True):
        pytest.skip("XLA multiplies so many rows")
    args = rows(others + tokens), weight, lens, ends, jnp.asarray(len(lengths), jnp.int32)
    together, alone = jax.jit(chain.chained(function))(*args), jax.jit(function)(*args)
    somebodys = [*range(own), *range(others, others + sum(lengths))]
    for got, want in zip(together, alone, strict=True):
        # An int8 row may be rounded another way where its float32 sums were made in another order.
        tolerance = 5e-2 if dtype == "int8" else 2e-2 if dtype == "bfloat16" else 1e-4
        np.testing.assert_allclose(got[somebodys,], want[somebodys,], rtol=tolerance, atol=tolerance)
    kernel = products._kernel(others + tokens, weight, True)
    assert kernel is not None
    steps_over = own < others and (kernel.spec is GEMM or tokens == 0)  # few rows are not worth it amid others
    assert not steps_over or not np.array_equal(together[0][own:others], alone[0][own:others])


@needs_numba
@pytest.mark.parametrize("dtype", by_default(["bfloat16", "float32", "int8"]))
@pytest.mark.parametrize("lengths", [(120,), (40, 9)])
def test_unread_rows_are_skipped_after_the_attention_call_that_names_them(dtype: str, lengths: tuple[int, ...]) -> None:
    others, tokens, unread = 3, sum(lengths) + 5, lengths[0] - 1
    kv = pages_of(16, count=40)
    ends = jnp.asarray(np.pad(np.cumsum((0, *lengths)), (0, 2 - len(lengths)), mode="edge"), jnp.int32)
    lens = jnp.asarray([4, 7, 0, *lengths, *[0] * (2 - len(lengths))], jnp.int32)
    table = jnp.arange(others + 2, dtype=jnp.int32)[:, None] % 40 + jnp.zeros((1, 16), jnp.int32)
    scales = jnp.ones((E,), jnp.float32) / 100 if dtype == "int8" else None

    def function(x: jax.Array, weight: jax.Array, count: jax.Array, unread: jax.Array | None) -> Any:
        q = products.multiply(x, weight, scales, quantize_rows=True)
        y = attention.paged_attention(
            AttentionInputs(q.reshape(-1, 4, 16), kv, table, lens, ends, count, unread=unread),
            AttentionOptions(decode_rows=others, scale=1.0),
        )
        return q, products.multiply(y.reshape(-1, E), weight, scales, x, quantize_rows=True)

    weight = (matrix() * (100 if dtype == "int8" else 1)).astype(dtype)
    if not products.multiplies(others + tokens, weight, quantize_rows=True):
        pytest.skip("XLA multiplies so many rows")
    args = rows(others + tokens), weight, jnp.asarray(len(lengths), jnp.int32)
    chained = jax.jit(chain.chained(function))
    (q, all_of_them), (before, some) = chained(*args, None), chained(*args, jnp.asarray(unread, jnp.int32))
    prompts = slice(others, others + sum(lengths))
    np.testing.assert_array_equal(before[prompts], q[prompts])
    assert not np.isclose(some[others : others + unread], all_of_them[others : others + unread]).all(axis=1).any()
    read = [0, 1, *range(others + unread, others + sum(lengths))]
    np.testing.assert_array_equal(some[read,], all_of_them[read,])


SPANS = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 20), st.integers(0, 6)), max_size=40)


@given(SPANS)
def test_what_is_in_use_at_the_same_time_lies_apart(spans: list[tuple[int, int, int]]) -> None:
    buffers = [Buffer(size, first, first + length) for size, first, length in spans]
    total = chain_plan.place(buffers)
    used: Counter[tuple[int, int]] = Counter()
    for buffer in buffers:
        end = chain_plan.STEP * buffer.number + buffer.size
        assert end <= total
        used.update(
            (time, step)
            for time in range(buffer.first, buffer.last + 1)
            for step in range(buffer.number, -(-end // chain_plan.STEP))
        )
    assert not used or max(used.values()) == 1


def test_memory_is_used_again() -> None:
    buffers = [Buffer(1000, time, time + 1) for time in range(100)]
    assert chain_plan.place(buffers) == 2 * 1024
