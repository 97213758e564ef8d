"""Pages of eight-bit keys with four-bit values, and of four bits for both: rotated, rounded, written and read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.kernel_cases import PACKED, Case, assert_attends, build
from helpers.thorough import by_default
from rekindle_kernels import LayerKV, abstract_pages, init_pages, paged_attention, unavailable_reason, write_kv
from rekindle_kernels.ops.attention import ATTENTION, WRITE_KV, AttentionCall, WriteCall
from rekindle_kernels.packed_pages import hadamard, quantize_four_bits, rotate, unpack
from rekindle_kernels.reference import sequence_keys_values

QUICK = {"int8_int4_mixed", "int8_int4_window_soft_cap_sinks", "int8_int4_blocks_of_32", "int4_mixed"}
QUICK_NATIVE = {"int8_int4_mixed", "int8_int4_one_row_and_one_head", "int8_int4_window_soft_cap_sinks"}
without_native = pytest.mark.skipif(unavailable_reason("cpu") is not None, reason="no native kernels")


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("size", [2, 64, 80, 96, 192, 256])
def test_a_rotation_keeps_products_and_undoes_itself(size: int) -> None:
    q, k = numbers(5, 3, size), numbers(5, 3, size, seed=1)
    np.testing.assert_allclose(rotate(rotate(q)), q, atol=1e-5)
    np.testing.assert_allclose(jnp.sum(rotate(q) * rotate(k), -1), jnp.sum(q * k, -1), atol=1e-4)
    assert rotate(q.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_the_matrix_is_sylvesters() -> None:
    np.testing.assert_array_equal(hadamard(4) * 2, [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])


def test_one_large_number_no_longer_takes_the_bits_of_the_others() -> None:
    x = numbers(200, 64).at[:, 7].mul(50)

    def error(vectors: jax.Array) -> float:
        codes, scales = quantize_four_bits(vectors)
        return float(jnp.sqrt(jnp.mean((unpack(codes) * scales[:, None] - vectors) ** 2)))

    assert error(rotate(x)) < 0.6 * error(x)


def test_four_bits_are_half_a_step_from_what_they_round() -> None:
    x = numbers(300, 32) * 10.0 ** jnp.arange(-15, 15).repeat(10)[:, None]
    codes, scales = quantize_four_bits(x)
    assert codes.dtype == jnp.uint8 and codes.shape == (300, 16)
    assert np.all(np.abs(unpack(codes) * scales[:, None] - x) <= 1.0001 * scales[:, None])
    low, high = np.asarray(unpack(codes))[:, 0], np.asarray(unpack(codes))[:, 16]
    np.testing.assert_array_equal((low + 15) // 2, codes[:, 0] & 15)
    np.testing.assert_array_equal((high + 15) // 2, codes[:, 0] >> 4)
    zeros, none = quantize_four_bits(jnp.zeros((1, 32)))
    assert not none.any() and np.isfinite(unpack(zeros) * none[:, None]).all()


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [("int8-int4", 64 + 32 + 8), ("int4", 32 + 32 + 8), ("int8", 64 + 64 + 8)]
)
def test_a_token_takes_the_bytes_of_its_format(dtype: str, nbytes: int) -> None:
    shapes = abstract_pages(3, 2, 16, 64, dtype)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)) == 3 * 16 * 2 * nbytes
    kv = init_pages(3, 2, 16, 64, dtype)
    assert (kv.dtype.name, kv.head_dim, kv.kv_heads, kv.page_size, kv.latent) == (dtype, 64, 2, 16, False)


def written(dtype: str, head_dim: int, implementation: str, platform: str = "cpu") -> LayerKV:
    k, v = 3 * numbers(40, 2, head_dim), numbers(40, 2, head_dim, seed=1)
    at = jnp.arange(40)
    run = jax.jit(partial(write_kv, implementation=implementation))
    return run(init_pages(7, 2, 16, head_dim, dtype, platform=platform), k, v, 1 + at // 16, at % 16)


@pytest.mark.parametrize("dtype", ["int8-int4", "int4"])
@pytest.mark.parametrize("head_dim", by_default([64, 80, 96, 128], 2))
def test_pages_hold_the_rotated_keys_and_values(dtype: str, head_dim: int) -> None:
    keys, values = sequence_keys_values(written(dtype, head_dim, "xla"), jnp.asarray([1, 2, 3]))
    for part, (stored, seed, size) in enumerate(((keys, 0, 3), (values, 1, 1))):
        want = np.asarray(rotate(size * numbers(40, 2, head_dim, seed=seed)))
        codes = 127 if dtype == "int8-int4" and part == 0 else 15
        step = np.abs(want).max(axis=-1, keepdims=True) / codes
        assert np.all(np.abs(np.asarray(stored[:40]) - want) <= (0.5001 if codes == 127 else 1.0001) * step)
        assert not np.asarray(stored[40:]).any()


def test_rows_of_tpus_and_the_scatter_write_the_same() -> None:
    rows, scatter = (written("int8-int4", 64, name, platform="tpu") for name in ("rows", "xla"))
    assert rows.head_dim == 128, "whole lanes"
    for got, want in zip(jax.tree.leaves(rows), jax.tree.leaves(scatter), strict=True):
        np.testing.assert_array_equal(got, want)


@without_native
@pytest.mark.parametrize(("dtype", "head_dim"), by_default([("int8-int4", 64), ("int8-int4", 96), ("int4", 64)]))
def test_native_writing_equals_the_scatter(dtype: str, head_dim: int) -> None:
    got, want = (written(dtype, head_dim, name) for name in ("native", "xla"))
    for mine, theirs in zip(map(codes_of, jax.tree.leaves(got)), map(codes_of, jax.tree.leaves(want)), strict=True):
        # Two orders of the same sums: a number on the border between two steps may be rounded either way.
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=0 if mine.dtype == np.float32 else 1)
        assert np.mean(mine != theirs) < (0.5 if mine.dtype == np.float32 else 1e-3)


def codes_of(leaf: jax.Array) -> np.ndarray:
    """Return the numbers of an array of pages; a byte of two four-bit numbers as both."""
    numbers = np.asarray(leaf)
    return np.stack([numbers & 15, numbers >> 4]).astype(np.int16) if numbers.dtype == np.uint8 else numbers


@without_native
def test_native_writing_of_vectors_that_are_not_finite_and_of_zeros() -> None:
    k = numbers(4, 1, 64).at[1, 0, 3].set(jnp.nan).at[2].set(0).at[3, 0, 0].set(1e-38)
    at = jnp.arange(4)
    kv = jax.jit(partial(write_kv, implementation="native"))(
        init_pages(3, 1, 16, 64, "int8-int4"), k, k, at * 0 + 1, at
    )
    keys, values = sequence_keys_values(kv, jnp.asarray([1]))
    for stored in (np.asarray(keys)[:4, 0], np.asarray(values)[:4, 0]):
        assert np.isnan(stored[1]).all() and not stored[2].any() and np.isfinite(stored[[0, 3]]).all()


@without_native
def test_native_writing_stays_within_its_pages() -> None:
    at, k = jnp.arange(6), numbers(6, 1, 64)
    ids, offsets = jnp.asarray([1, 9, -1, 2, 1, 1]), jnp.asarray([0, 0, 0, 16, -3, 15])
    kv = jax.jit(partial(write_kv, implementation="native"))(init_pages(3, 1, 16, 64, "int8-int4"), k, k, ids, offsets)
    assert len(at) == 6 and np.flatnonzero(np.asarray(kv.scales)[1, 0, 0]).tolist() == [0, 15]
    assert not np.asarray(kv.scales)[2].any() and np.asarray(kv.scales)[0].any(), "others go to the scratch page"


@without_native
@pytest.mark.parametrize("case", by_default(PACKED, lambda case: case.name in QUICK_NATIVE), ids=lambda case: case.name)
def test_native_kernels_attend_as_the_reference_does(case: Case) -> None:
    problem = build(case)
    assert_attends(jax.jit(partial(paged_attention, options=problem.options, implementation="native")), case, problem)


@without_native
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    problem = build(Case("rows", decode=(40, 300), prefill=((20, 70), (33, 90)), head_dim=64, kv_dtype="int8-int4"))
    inputs, options = problem.inputs, replace(problem.options, deterministic=True)
    whole = np.asarray(jax.jit(partial(paged_attention, options=options))(inputs))
    for row in range(2):
        alone = replace(
            inputs, q=inputs.q[row : row + 1], page_table=inputs.page_table[row : row + 1],
            kv_lens=inputs.kv_lens[row : row + 1], cu_q_lens=jnp.zeros(1, jnp.int32), num_prefills=jnp.int32(0),
        )  # fmt: skip
        one = np.asarray(jax.jit(partial(paged_attention, options=replace(options, decode_rows=1)))(alone))
        np.testing.assert_array_equal(one[0], whole[row])


@pytest.mark.parametrize("name", ["xla", "xla_gpu"])
@pytest.mark.parametrize("case", by_default(PACKED, lambda case: case.name in QUICK), ids=lambda case: case.name)
def test_xla_attends_as_the_reference_does(name: str, case: Case) -> None:
    problem = build(case)
    assert_attends(jax.jit(partial(paged_attention, options=problem.options, implementation=name)), case, problem)


def test_the_result_is_near_that_of_exact_pages_and_nearer_with_longer_keys() -> None:
    case = Case("float32_long", decode=(700, 300), prefill=((20, 600),), head_dim=64, page_size=32)

    def result(dtype: str) -> np.ndarray:
        problem = build(replace(case, kv_dtype=dtype))
        return np.asarray(paged_attention(problem.inputs, problem.options, implementation="reference"))

    exact = result("float32")
    errors = {dtype: float(np.sqrt(np.mean((result(dtype) - exact) ** 2))) for dtype in ("int8", "int8-int4", "int4")}
    assert errors["int8"] < errors["int8-int4"] < errors["int4"] < 0.5 * float(np.std(exact))


@pytest.mark.parametrize("dtype", ["int8-int4", "int4"])
def test_kernels_that_cannot_read_them_say_so(dtype: str) -> None:
    problem = build(Case("mixed", decode=(9,), prefill=((3, 20),), head_dim=64, kv_dtype=dtype), poison=False)
    for platform, name in (("gpu", "pallas_gpu"), ("tpu", "pallas_tpu")):
        call = AttentionCall.of(problem.inputs, problem.options, platform)
        assert f"pages are {dtype}" in str(ATTENTION.load(name).reason_against(call))
        assert ATTENTION.choose(call, None).name in ("xla", "xla_gpu")
        write = WriteCall(platform, 12, 2, 64, 16, problem.inputs.kv.dtype, scaled=True)
        assert WRITE_KV.choose(write, None).name in ("xla", "rows")
