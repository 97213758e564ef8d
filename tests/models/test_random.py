"""Random weights: what a device draws has the shapes, dtypes, constants and spreads of what the host draws."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from helpers import checkpoints
from rekindle._src.models import abstract_model, config_from_hf, random_model
from rekindle._src.models.base import drawn_on_device


@pytest.mark.parametrize(("name", "dtype", "quantize"), [("llama", "bfloat16", None), ("mixtral", "float32", "int8")])
def test_a_device_draws_what_the_host_draws(name: str, dtype: str, quantize: str | None) -> None:
    config = config_from_hf(checkpoints.CASES[name])
    graph, shapes = abstract_model(config, dtype, quantize)
    host, device = random_model(config, dtype=dtype, quantize=quantize).leaves, drawn_on_device(graph, shapes, 0)
    for path, ours, theirs in zip(graph.paths, device, host, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), path
        left, right = (np.asarray(leaf.astype(jnp.float32)) for leaf in (ours, theirs))
        if np.ptp(right) == 0:  # norms, biases, scales
            np.testing.assert_allclose(left, right, rtol=1e-6)
        else:
            assert left.std() == pytest.approx(right.std(), rel=0.15), path
            assert abs(left.mean()) < 0.15 * right.std(), path
    at = graph.paths.index("embed.weight")
    other = drawn_on_device(graph, shapes, 1)[at]
    assert not np.array_equal(np.asarray(other), np.asarray(device[at])), "the seed changes nothing"
