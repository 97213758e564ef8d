"""The native training step computes what the step through XLA does."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rekindle._src.models.registry import config_from_hf
from rekindle._src.tiny_training import native, optimizer
from rekindle._src.tiny_training.batches import PAD
from rekindle._src.tiny_training.objective import mean_loss
from rekindle._src.tiny_training.optimizer import State, is_matrix, orthogonal
from rekindle._src.tiny_training.recipe import Recipe, Stage
from rekindle._src.tiny_training.train import initial, join, split

SMALL = Recipe(
    stages=(Stage(4, 64, 1),),
    vocab_size=96,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=96,
)


@pytest.fixture(scope="module")
def model() -> tuple:
    graph, leaves = initial(SMALL, config_from_hf(SMALL.config([0], 0)))
    rng = np.random.default_rng(0)
    # Some of the initial weights are zero, and so would be their gradients' parts.
    return graph, tuple(leaf + jnp.asarray(0.05 * rng.standard_normal(leaf.shape), jnp.float32) for leaf in leaves)


@pytest.fixture(scope="module")
def steps(model: tuple, tmp_path_factory: pytest.TempPathFactory) -> native.Steps:
    if (code := native.load_code(tmp_path_factory.mktemp("native"))) is None:
        pytest.skip("needs a processor with AMX and a C++ compiler")
    graph, leaves = model
    return native.Steps(code, graph, [leaf.shape for leaf in leaves])


def windows() -> np.ndarray:
    found = np.random.default_rng(1).integers(0, 96, (4, 65)).astype(np.int32)
    found[1, 40:] = PAD
    return found


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_autodiff(model: tuple, steps: native.Steps) -> None:
    graph, leaves = model
    loss, gradients = jax.value_and_grad(mean_loss)(leaves, graph, jnp.asarray(windows()))
    native_loss, native_gradients = steps.loss_and_gradients(join(leaves), windows())
    assert native_loss == pytest.approx(float(loss), rel=2e-3)
    shapes = tuple(leaf.shape for leaf in leaves)
    for path, found, wanted in zip(graph.paths, split(native_gradients, shapes), gradients, strict=True):
        assert off(np.asarray(found), np.asarray(wanted)) < 0.1, path  # products are 16-bit: 0.01 to 0.06


def test_the_gradients_repeat_to_the_bit(model: tuple, steps: native.Steps) -> None:
    first, second = (steps.loss_and_gradients(join(model[1]), windows()) for _ in range(2))
    assert first[0] == second[0]
    np.testing.assert_array_equal(first[1], second[1])


def test_the_optimizer_takes_the_same_step(model: tuple, steps: native.Steps) -> None:
    graph, leaves = model
    shapes = tuple(leaf.shape for leaf in leaves)
    _, gradients = steps.loss_and_gradients(join(leaves), windows())
    values, means, squares = join(leaves), np.zeros_like(gradients), np.zeros_like(gradients)
    steps.optimize(values, gradients, means, squares, 3, (0.02, 0.006))
    state = optimizer.initial(leaves)
    wanted, (wanted_means, wanted_squares) = optimizer.step(
        graph.paths, leaves, split(gradients, shapes), state, *map(jnp.float32, (3.0, 0.02, 0.006))
    )
    np.testing.assert_allclose(means, join(wanted_means), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(squares, join(wanted_squares), rtol=1e-5, atol=1e-12)
    before = join(leaves)
    for path, found, new, old in zip(graph.paths, split(values, shapes), wanted, split(before, shapes), strict=True):
        assert off(np.asarray(found - old), np.asarray(new - old)) < 0.05, path


def test_what_the_native_code_does_not_know_goes_through_xla(model: tuple) -> None:
    graph, _ = model
    assert native.Steps.fit(graph, [(4, 64)])
    assert not native.Steps.fit(graph, [(4, 48)])
    assert not native.Steps.fit(graph, [(3, 64)])


def test_muon_makes_singular_values_about_one(tmp_path: Path) -> None:
    for shape in ((96, 64), (64, 96)):
        found = orthogonal(jnp.asarray(np.random.default_rng(2).standard_normal(shape), jnp.float32))
        values = np.linalg.svd(np.asarray(found), compute_uv=False)
        assert values.min() > 0.5 and values.max() < 1.3
    assert is_matrix("layers.0.mlp.down.weight") and not is_matrix("layers.0.mlp_norm.weight")
    assert isinstance(optimizer.initial((jnp.zeros(3),)), State)
