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
from rekindle_kernels.ops.added_keys import ADD_KEYS

NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(unavailable_reason() is not None, reason="numba is not installed")
)
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
    scores = np.where(seen, np.einsum("hmd,hnd->hmn", q.astype(np.float64), k) * 0.3, -np.inf)
    most = scores.max(axis=-1, keepdims=True)
    weights = np.where(seen, np.exp(scores - np.where(np.isfinite(most), most, 0)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("hmn,hnd->hmd", weights / np.where(total > 0, total, 1), v)


@pytest.mark.parametrize("implementation", [NATIVE, "xla"])
@pytest.mark.parametrize(("heads", "queries", "keys", "size"), by_default(SHAPES, 3))
def test_blocks_of_keys_add_up(heads: int, queries: int, keys: int, size: int, implementation: str) -> None:
    """In blocks of any number, in the order of a picture, and with scores that rise and fall by tens."""
    q, k, v = floats(heads, queries, size) * 3, floats(heads, keys, size) * 3, floats(heads, keys, size)
    starts, stops = ranges(queries, keys)
    add = jax.jit(partial(add_keys, scale=0.3, implementation=implementation), donate_argnums=0)
    sums = AttentionSums.none(heads, queries, size)
    for first, end in ((0, keys // 3), (keys // 3, keys)):
        if first < end:
            block = k[:, first:end], v[:, first:end]
            sums = add(sums, q, *block, starts - first, stops - first)
    want = expected(q, k, v, starts, stops)
    np.testing.assert_allclose(sums.result, want, rtol=0, atol=5e-5)
    unseeing = stops <= np.maximum(starts, 0)
    assert not np.asarray(sums.result)[:, unseeing].any() and not np.asarray(sums.total)[:, unseeing].any()


@pytest.mark.skipif(unavailable_reason() is not None, reason="numba is not installed")
def test_a_querys_sums_are_the_same_to_the_last_bit_whatever_its_neighbours_are() -> None:
    q, k, v = floats(2, 140, 72), floats(2, 128, 72), floats(2, 128, 72)
    starts, stops = ranges(140, 128)
    none = AttentionSums.none(2, 140, 72)
    whole = add_keys(none, q, k, v, starts, stops, 0.3, implementation="native")
    for first, end in ((0, 1), (5, 9), (126, 140)):
        some = (jax.tree.map(lambda x, a=first, b=end: x[:, a:b], none), q[:, first:end], k, v)
        alone = add_keys(*some, starts[first:end], stops[first:end], 0.3, implementation="native")
        for one, other in zip(alone, whole, strict=True):
            np.testing.assert_array_equal(one, other[:, first:end])


@pytest.mark.skipif(unavailable_reason() is not None, reason="numba is not installed")
@pytest.mark.parametrize("far", [2**31 - 1, -(2**31), 2**20, -5])
def test_places_outside_of_the_block_are_not_read(far: int) -> None:
    q, k, v = floats(1, 6, 64), floats(1, 70, 64), floats(1, 70, 64)
    none = AttentionSums.none(1, 6, 64)
    ends = np.full(6, 70, np.int32)
    starts, stops = (np.array([0, far, 0, far, 0, 0], np.int32) for _ in range(2))
    low = add_keys(none, q, k, v, starts, ends, 0.3, implementation="native")
    high = add_keys(none, q, k, v, 0 * ends, np.maximum(stops, 1), 0.3, implementation="native")
    for sums, others in ((low, (starts, ends)), (high, (0 * ends, np.maximum(stops, 1)))):
        np.testing.assert_allclose(sums.result, expected(q, k, v, *others), rtol=0, atol=1e-5)


def test_which_implementation_adds_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = jax.ShapeDtypeStruct((2, 5, 72), jnp.float32)
    narrow = jax.ShapeDtypeStruct((2, 5, 72), jnp.bfloat16)
    if unavailable_reason() is None:
        assert ADD_KEYS.choose(AddKeysCall("cpu", heads, heads)).name == "native"
    assert ADD_KEYS.choose(AddKeysCall("cpu", narrow, narrow)).name == "xla"
    assert ADD_KEYS.choose(AddKeysCall("gpu", heads, heads)).name == "xla"
    with pytest.raises(ValueError, match="heads are bfloat16 and bfloat16, not float32"):
        ADD_KEYS.choose(AddKeysCall("cpu", narrow, narrow), "native")
    monkeypatch.setenv("REKINDLE_NATIVE", "0")
    assert ADD_KEYS.choose(AddKeysCall("cpu", heads, heads)).name == "xla"
