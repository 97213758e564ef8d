"""Writing tokens into pages and moving pages: values, places, and that nothing copies the whole array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.thorough import by_default
from rekindle_kernels import LayerKV, gather_pages, init_pages, scatter_pages, write_kv
from rekindle_kernels.pages import as_values

DTYPES = ("float32", "float16", "bfloat16", "int8")


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def read(kv: LayerKV) -> np.ndarray:
    """What the pages mean, float32 [P, 2, K, S, D]."""
    values = as_values(kv.pages, kv).astype(jnp.float32)
    return np.asarray(values if kv.scales is None else values * kv.scales[..., None])


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_puts_each_token_in_its_place_and_nothing_else(dtype: str) -> None:
    kv = init_pages(5, 2, 4, 8, dtype)
    k, v = numbers(3, 2, 8), numbers(3, 2, 8, seed=1)
    pages, offsets = jnp.asarray([3, 1, 3], jnp.int32), jnp.asarray([0, 3, 2], jnp.int32)
    got = read(jax.jit(write_kv)(kv, k, v, pages, offsets))
    want = np.zeros_like(got)
    for token in range(3):
        want[pages[token], 0, :, offsets[token]] = k[token]
        want[pages[token], 1, :, offsets[token]] = v[token]
    # Rounding of the type; int8: half a step of the largest of each vector (at most 3.5 here) / 127.
    largest = {"float32": 0, "float16": 2e-3, "bfloat16": 1.6e-2, "int8": 1.4e-2}[dtype]
    np.testing.assert_allclose(got, want, rtol=0, atol=largest)
    assert not got[want == 0].any()


def test_int8_vectors_of_zeros_stay_zeros() -> None:
    kv = init_pages(2, 1, 4, 8, "int8")
    one = jnp.ones(1, jnp.int32)
    got = read(write_kv(kv, jnp.zeros((1, 1, 8)), jnp.zeros((1, 1, 8)), one, one))
    assert not got.any()


def test_int8_error_is_half_a_step_of_each_vectors_own_scale() -> None:
    kv = init_pages(2, 1, 16, 64, "int8")
    sizes = 10.0 ** jnp.arange(-8, 8)
    k = numbers(16, 1, 64) * sizes[:, None, None]
    got = read(write_kv(kv, k, k, jnp.ones(16, jnp.int32), jnp.arange(16)))[1, 0, 0]
    error = np.abs(got - np.asarray(k[:, 0])).max(axis=-1)
    step = np.abs(np.asarray(k[:, 0])).max(axis=-1) / 127
    assert np.all(error <= 0.5001 * step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", by_default([32, 2]))
def test_write_copies_no_pages(dtype: str, tokens: int) -> None:
    """Several layers, donated: temporaries are of the size of the tokens, and every leaf is updated where it is."""
    layers = [init_pages(200, 3, 16, 64, dtype) for _ in range(4)]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(layers))
    k, at = numbers(tokens, 3, 64), jnp.arange(tokens, dtype=jnp.int32)

    def step(layers: list[LayerKV], k: jax.Array, at: jax.Array) -> list[LayerKV]:
        return [write_kv(kv, k + i, k, 1 + at, at % 16) for i, kv in enumerate(layers)]

    used = jax.jit(step, donate_argnums=0).lower(layers, k, at).compile().memory_analysis()
    assert used.alias_size_in_bytes == size
    assert used.temp_size_in_bytes < size / 20


@pytest.mark.parametrize("dtype", by_default(DTYPES, 2))
def test_gathered_pages_come_back_bit_by_bit(dtype: str) -> None:
    at = jnp.arange(24, dtype=jnp.int32)
    kv = write_kv(init_pages(7, 2, 4, 8, dtype), numbers(24, 2, 8), numbers(24, 2, 8, seed=1), 1 + at // 4, at % 4)
    moved = jax.jit(gather_pages)(kv, jnp.asarray([5, 2, 0], jnp.int32))
    assert moved.num_pages == 3 and moved.dtype == kv.dtype
    pages = [jax.tree.map(lambda leaf, at=at: leaf[at : at + 1], moved) for at in range(3)]
    back = jax.jit(scatter_pages, donate_argnums=0)(init_pages(9, 2, 4, 8, dtype), jnp.asarray([1, 8, 0]), pages)
    for want, got in zip(jax.tree.leaves(kv), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(got[1], want[5])
        np.testing.assert_array_equal(got[8], want[2])
        assert not np.asarray(got[2:8]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_copies_no_pages(dtype: str) -> None:
    kv = init_pages(300, 2, 16, 64, dtype)
    few = [gather_pages(kv, jnp.arange(1))] * 4
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(kv))
    used = jax.jit(scatter_pages, donate_argnums=0).lower(kv, jnp.arange(4), few).compile().memory_analysis()
    assert used.alias_size_in_bytes == size
    assert used.temp_size_in_bytes < size / 20
