"""Other weights of the same shapes take a model's place without a new program; misfits are listed at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers import checkpoints
from rekindle._src.models.base import merge
from rekindle._src.models.loading.hugepages import aligned
from rekindle._src.opening.weights import replace_weights
from rekindle.errors import CheckpointError
from workshop import reference

RAW = checkpoints.CASES["llama"]
OLD = checkpoints.case("llama")
NEW = checkpoints.model(RAW, checkpoints.tensors(RAW, seed=1))
TOKENS = [1, 5, 9, 13]


def logits(model) -> np.ndarray:
    return np.asarray(reference.prefill(model, TOKENS, reference.empty_cache(model, 8))[0])


def test_the_new_weights_compute_without_a_new_program() -> None:
    before = logits(OLD)
    traced = reference.forward._cache_size()
    swapped = replace_weights(OLD, NEW, fingerprint="new")
    np.testing.assert_array_equal(logits(swapped), logits(NEW))
    assert not np.array_equal(logits(swapped), before)
    assert reference.forward._cache_size() == traced
    assert (swapped.graph, swapped.fingerprint) == (OLD.graph, "new")
    np.testing.assert_array_equal(logits(OLD), before)


def test_modules_states_and_arrays_by_path_are_weights_too() -> None:
    module = merge(NEW.graph, NEW.leaves)
    forms = (
        module,
        nnx.state(module),
        nnx.state(module, nnx.Param),
        dict(zip(NEW.graph.paths, map(np.asarray, NEW.leaves), strict=True)),
    )
    fingerprints = set()
    for form in forms:
        swapped = replace_weights(OLD, form)
        np.testing.assert_array_equal(logits(swapped), logits(NEW))
        fingerprints.add(swapped.fingerprint)
    assert len(fingerprints | {OLD.fingerprint}) == len(forms) + 1, "nothing cached may match unnamed weights"


def test_arrays_are_copied() -> None:
    arrays = {path: aligned(leaf.shape, leaf.dtype) for path, leaf in zip(NEW.graph.paths, NEW.leaves, strict=True)}
    for path, leaf in zip(NEW.graph.paths, NEW.leaves, strict=True):
        arrays[path][...] = np.asarray(leaf)
    swapped = replace_weights(OLD, arrays)
    for array in arrays.values():
        array[...] = 0
    np.testing.assert_array_equal(logits(swapped), logits(NEW))


def test_a_loaded_model_brings_its_fingerprint() -> None:
    assert replace_weights(OLD, NEW).fingerprint == NEW.fingerprint


def test_all_differences_are_in_one_error() -> None:
    arrays: dict[str, jax.Array] = dict(zip(NEW.graph.paths, NEW.leaves, strict=True))
    del arrays["norm.weight"]
    arrays["extra.weight"] = jnp.zeros(3)
    arrays["head.weight"] = arrays["head.weight"].astype(jnp.bfloat16)
    arrays["embed.weight"] = arrays["embed.weight"][:5]
    with pytest.raises(CheckpointError) as caught:
        replace_weights(OLD, arrays)
    for said in (
        "4 differences",
        "missing: norm.weight",
        "unexpected: extra.weight",
        "head.weight: bfloat16[160, 48], expected float32[160, 48]",
        "embed.weight: float32[5, 48], expected float32[160, 48]",
    ):
        assert said in str(caught.value)


def test_the_same_shapes_under_another_config_are_refused() -> None:
    other = checkpoints.model({**RAW, "rms_norm_eps": 0.1}, checkpoints.tensors(RAW))
    with pytest.raises(CheckpointError, match="configs differ"):
        replace_weights(OLD, other)


def test_files_of_a_trainer_may_name_another_dtype_and_other_ends() -> None:
    other = checkpoints.model({**RAW, "torch_dtype": "bfloat16", "eos_token_id": 9}, checkpoints.tensors(RAW))
    assert other.config != OLD.config and replace_weights(OLD, other).config == OLD.config
