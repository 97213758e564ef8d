"""Random weights: what a device draws has the shapes, dtypes, constants and spreads of what the host draws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.plain_loop import plain_loop
from helpers.thorough import by_default
from rekindle._src.models import base
from rekindle._src.models.base import ALONE, abstract_model, drawn_on_device
from rekindle._src.models.placement import random_model
from rekindle._src.models.registry import config_from_hf


@pytest.mark.parametrize(
    ("name", "dtype", "quantize"), by_default([("llama", "bfloat16", None), ("mixtral", "float32", "int8")])
)
def test_a_device_draws_what_the_host_draws(name: str, dtype: str, quantize: str | None) -> None:
    config = config_from_hf(checkpoints.CASES[name])
    graph, shapes = abstract_model(config, dtype, quantize)
    host = random_model(config, dtype=dtype, quantize=quantize).leaves
    device = tuple(drawn_on_device(graph, shapes, 0))
    for path, ours, theirs in zip(graph.paths, device, host, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), path
        left, right = (np.asarray(leaf.astype(jnp.float32)) for leaf in (ours, theirs))
        if np.ptp(right) == 0:  # norms, biases, scales
            np.testing.assert_allclose(left, right, rtol=1e-6)
        else:
            assert left.std() == pytest.approx(right.std(), rel=0.15), path
            assert abs(left.mean()) < 0.15 * right.std(), path
    at = graph.paths.index("embed.weight")
    other = tuple(drawn_on_device(graph, shapes, 1))[at]
    assert not np.array_equal(np.asarray(other), np.asarray(device[at])), "the seed changes nothing"


def test_a_device_compiles_one_drawing_program_for_each_shape() -> None:
    graph, shapes = abstract_model(config_from_hf(checkpoints.CASES["llama"] | {"num_hidden_layers": 8}), "float32")
    before = base.drawn_leaf._cache_size()
    tuple(drawn_on_device(graph, shapes, 0))
    drawn = sum("norm" not in path for path in graph.paths)
    assert base.drawn_leaf._cache_size() - before < drawn / 4, "layers share their programs"


@pytest.mark.thorough
def test_a_model_made_on_a_mesh_is_the_model_of_one_device() -> None:
    config = config_from_hf(checkpoints.CASES["llama"])
    mesh = jax.make_mesh((1,), ("model",))
    alone, shared = random_model(config, seed=3), random_model(config, seed=3, mesh=mesh)
    assert shared.placement.devices == list(mesh.devices.flat)
    assert alone.placement is ALONE
    assert shared.fingerprint == alone.fingerprint
    checkpoints.assert_same(alone, shared)
    options = {"dtype": "float32", "max_requests": 2, "max_model_len": 48, "disk_memory": 0, "quiet": True}
    expected = tuple(plain_loop(alone, [1, 5, 9], 6, context=48))
    with rekindle.open_sync(shared, **options) as session:
        assert session.generate_sync([1, 5, 9], max_tokens=6, ignore_eos=True).token_ids == expected
        told = session.stats().mesh
        assert told is not None and told.size == 1
    with pytest.raises(rekindle.ConfigError, match=r"mesh=\{'model': 1\}: differs from the model's mesh <"):
        rekindle.open_sync(shared, mesh=1, **options)
