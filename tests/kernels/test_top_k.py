"""The k largest values of a row by blocks: the same numbers and places as XLA's own, ties and short rows included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers.thorough import by_default
from rekindle_kernels import top_k
from rekindle_kernels.ops.registry import current_platform
from rekindle_kernels.ops.sampling import TOP_K, SamplingCall


@pytest.mark.parametrize("width", by_default([50, 4097, 4096, 50257, 151936], 2))
@pytest.mark.parametrize("k", [1, 20, 64])
def test_blocks_find_what_a_sort_finds(width: int, k: int) -> None:
    random = np.random.default_rng(width + k)
    k = min(k, width)
    rows = (
        np.round(random.standard_normal((4, width)) * [[1e6], [30], [1], [0]]).astype(np.float32) + 0.0
    )  # ever more ties
    rows[1, random.integers(0, width, width // 2)] = -np.inf
    got, places = jax.jit(lambda x: top_k(x, k, implementation="blocks"))(rows)
    want, there = lax.top_k(jnp.asarray(rows), k)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    np.testing.assert_array_equal(np.asarray(places), np.asarray(there))


def test_only_a_gpu_goes_by_blocks() -> None:
    logits = jax.ShapeDtypeStruct((4, 50257), jnp.float32)
    names = {name: TOP_K.choose(SamplingCall(name, logits)).name for name in ("cpu", "gpu", "tpu")}
    assert names == {"cpu": "xla", "gpu": "blocks", "tpu": "xla"}
    assert current_platform() == "cpu"
