"""Attention whose keys come block after block: both implementations against a softmax over all keys at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.thorough import by_default
from rekindle_kernels import AddKeysCall, AttentionSums, add_keys, unavailable_reason
from rekindle_kernels.native import added_keys as native
from rekindle_kernels.native import cpu
from rekindle_kernels.ops.added_keys import ADD_KEYS

needs_numba = pytest.mark.skipif(unavailable_reason() is not None, reason="numba is not installed")
needs_amx = pytest.mark.skipif(not cpu.has_amx(), reason="no AMX")
NATIVE = pytest.param("native", marks=needs_numba)
DTYPES = ["float32", "bfloat16"]
SCALE = 0.25  # queries of bfloat16 times it are exact
RANDOM = np.random.default_rng(0)
SHAPES = [(1, 1, 1, 8), (3, 130, 100, 72), (2, 36, 288, 80), (2, 4, 64, 64), (1, 131, 257, 24), (2, 16, 70, 128)]


def floats(*shape: int) -> Any:
    return RANDOM.standard_normal(shape, np.float32)


def ranges(queries: int, keys: int) -> tuple[Any, Any]:
    """Where queries begin and end to see keys: some see all of them, some others, some none."""
    starts = RANDOM.integers(-keys, keys, queries).astype(np.int32)
    stops = (starts + RANDOM.integers(0, 2 * keys, queries)).astype(np.int32)
    starts[::3], stops[::3] = 0, keys
    stops[-1:] = starts[-1:]
    return starts, stops


def expected(q: Any, k: Any, v: Any, starts: Any, stops: Any) -> Any:
    """The same in float64, over all keys at once."""
    place = np.arange(k.shape[1])
    seen = (place >= starts[:, None]) & (place < stops[:, None])
    scores = np.where(seen, np.einsum("hmd,hnd->hmn", q.astype(np.float64), k) * SCALE, -np.inf)
    most = scores.max(axis=-1, keepdims=True)
    weights = np.where(seen, np.exp(scores - np.where(np.isfinite(most), most, 0)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("hmn,hnd->hmd", weights / np.where(total > 0, total, 1), v)


def summed(
    heads: int, queries: int, keys: int, size: int, dtype: str, implementation: str
) -> tuple[AttentionSums, Any, Any]:
    """The sums over keys in two blocks of any number, what their result should be, and which queries see no key.

    Queries see what those of pictures do, and scores rise and fall by tens.
    """
    q, k, v = (
        np.asarray(floats(heads, count, size) * factor).astype(dtype)
        for count, factor in ((queries, 3), (keys, 3), (keys, 1))
    )
    starts, stops = ranges(queries, keys)
    add = jax.jit(partial(add_keys, scale=SCALE, implementation=implementation), donate_argnums=0)
    sums = AttentionSums.none(heads, queries, size)
    for first, end in ((0, keys // 3), (keys // 3, keys)):
        if first < end:
            block = k[:, first:end], v[:, first:end]
            sums = add(sums, q, *block, starts - first, stops - first)
    want = expected(*(x.astype(np.float32) for x in (q, k, v)), starts, stops)
    return sums, want, stops <= np.maximum(starts, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [NATIVE, "xla"])
@pytest.mark.parametrize(("heads", "queries", "keys", "size"), by_default(SHAPES, 3))
def test_blocks_of_keys_add_up(heads: int, queries: int, keys: int, size: int, implementation: str, dtype: str) -> None:
    sums, want, unseeing = summed(heads, queries, keys, size, dtype, implementation)
    np.testing.assert_allclose(sums.result, want, rtol=0, atol=5e-5 if dtype == "float32" else 1.5e-2)
    assert not np.asarray(sums.result)[:, unseeing].any() and not np.asarray(sums.total)[:, unseeing].any()


@needs_numba
@needs_amx
@pytest.mark.parametrize("size", [64, 7, 40])
def test_bfloat16_without_amx_gives_what_it_gives_with_it(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of pairs are summed in another order, and a weight may be rounded the other way."""
    results = []
    for amx in (True, False):
        monkeypatch.setattr(native, "has_amx", lambda amx=amx: amx)
        RANDOM.bit_generator.state = np.random.default_rng(5).bit_generator.state
        results.append(np.asarray(summed(2, 150, 300, size, "bfloat16", "native")[0].result))
    np.testing.assert_allclose(*results, rtol=0, atol=1e-2)
    assert (results[0] != results[1]).any(), "the setting chooses the instructions"


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_querys_sums_are_the_same_to_the_last_bit_whatever_its_neighbours_are(dtype: str) -> None:
    q, k, v = (floats(2, count, 72).astype(dtype) for count in (140, 128, 128))
    starts, stops = ranges(140, 128)
    none = AttentionSums.none(2, 140, 72)
    whole = add_keys(none, q, k, v, starts, stops, SCALE, implementation="native")
    for first, end in ((0, 1), (5, 9), (126, 140)):
        some = (jax.tree.map(lambda x, a=first, b=end: x[:, a:b], none), q[:, first:end], k, v)
        alone = add_keys(*some, starts[first:end], stops[first:end], SCALE, implementation="native")
        for one, other in zip(alone, whole, strict=True):
            np.testing.assert_array_equal(one, other[:, first:end])


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("far", [2**31 - 1, -(2**31), 2**20, -5])
def test_places_outside_of_the_block_are_not_read(far: int, dtype: str) -> None:
    q, k, v = (floats(1, count, 64).astype(dtype) for count in (6, 70, 70))
    wide = [x.astype(np.float32) for x in (q, k, v)]
    none = AttentionSums.none(1, 6, 64)
    ends = np.full(6, 70, np.int32)
    starts, stops = (np.array([0, far, 0, far, 0, 0], np.int32) for _ in range(2))
    low = add_keys(none, q, k, v, starts, ends, SCALE, implementation="native")
    high = add_keys(none, q, k, v, 0 * ends, np.maximum(stops, 1), SCALE, implementation="native")
    for sums, others in ((low, (starts, ends)), (high, (0 * ends, np.maximum(stops, 1)))):
        atol = 1e-5 if dtype == "float32" else 1e-2
        np.testing.assert_allclose(sums.result, expected(*wide, *others), rtol=0, atol=atol)


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_seen_changes_nothing(dtype: str) -> None:
    """Keys that no query sees have no weight, whatever they hold; a NaN that one sees is in its own sums alone."""
    q, k, v = (floats(1, count, 24).astype(dtype) for count in (70, 200, 200))
    starts, stops = np.zeros(70, np.int32), np.full(70, 150, np.int32)
    stops[3] = 151
    add = jax.jit(partial(add_keys, scale=SCALE, implementation="native"))
    none = AttentionSums.none(1, 70, 24)
    want = np.asarray(add(none, q, k, v, starts, stops).result)
    k[:, 151:] = np.inf
    np.testing.assert_array_equal(add(none, q, k, v, starts, stops).result, want)
    k[:, 150] = np.nan
    got = np.asarray(add(none, q, k, v, starts, stops).result)
    assert np.isnan(got[:, 3]).all()
    np.testing.assert_array_equal(np.delete(got, 3, axis=1), np.delete(want, 3, axis=1))


def test_which_implementation_adds_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = jax.ShapeDtypeStruct((2, 5, 72), jnp.float32)
    narrow = jax.ShapeDtypeStruct((2, 5, 72), jnp.bfloat16)
    half = jax.ShapeDtypeStruct((2, 5, 72), jnp.float16)
    if unavailable_reason() is None:
        assert ADD_KEYS.choose(AddKeysCall("cpu", heads, heads)).name == "native"
        assert ADD_KEYS.choose(AddKeysCall("cpu", narrow, narrow)).name == "native"
    assert ADD_KEYS.choose(AddKeysCall("cpu", half, half)).name == "xla"
    assert ADD_KEYS.choose(AddKeysCall("gpu", heads, heads)).name == "xla"
    with pytest.raises(ValueError, match="heads are float32 and bfloat16, not both float32 or both bfloat16"):
        ADD_KEYS.choose(AddKeysCall("cpu", heads, narrow), "native")
    monkeypatch.setenv("REKINDLE_NATIVE", "0")
    assert ADD_KEYS.choose(AddKeysCall("cpu", heads, heads)).name == "xla"
