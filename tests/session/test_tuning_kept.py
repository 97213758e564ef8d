"""Results of layers that a training keeps for its backward pass, compared with computing them again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rekindle
from helpers import checkpoints
from helpers.thorough import by_default
from rekindle._src.capabilities.tuning import memory
from rekindle._src.capabilities.tuning.owner import TuningPrograms
from rekindle._src.capabilities.tuning.sites import trained_matrices
from rekindle._src.capabilities.tuning.step import Pair, TrainingCut, TrainingShape
from rekindle._src.capabilities.tuning.trainer import Trainer, initial_pairs

FAMILIES = [
    "llama", "gemma2", "gpt-oss", "deepseek-v2", "qwen3-moe", "lfm2", "falcon-h1", "olmo2", "cohere", "ling3", "apertus"
]  # fmt: skip
SHAPE = TrainingShape(2, 16, 16)


def parts(name: str) -> tuple[TrainingCut, int, tuple[Any, ...]]:
    """A cut, its last layer, and the operands of that layer's function."""
    model = checkpoints.case(name)
    matrices = trained_matrices(model.config, "all")
    cut = TrainingCut.of(model.graph, model.leaves, matrices, 0.5)
    layer = model.config.num_layers - 1
    rng = np.random.default_rng(0)
    pairs = {
        matrix.name: Pair(jnp.asarray(down), jnp.asarray(rng.normal(size=up.shape) * 0.1, jnp.float32))
        for matrix, (down, up) in zip(matrices, initial_pairs(matrices, 4, 0), strict=True)
        if matrix.layer == layer
    }
    tokens = rng.integers(3, model.config.vocab_size, (SHAPE.rows, SHAPE.tokens)).astype(np.int32)
    outer = tuple(model.leaves[index] for index in cut.cut.outer)
    opened = jax.jit(cut.opening)(outer, tokens, np.array([16, 9], np.int32))
    leaves = tuple(model.leaves[index] for index in cut.cut.layers[layer])
    return cut, layer, (leaves, pairs, opened.x, (), opened.tables, opened.own[layer : layer + 1])


@pytest.mark.parametrize("name", by_default(FAMILIES, lambda n: n == "llama"))
def test_derivatives_are_the_same_and_take_fewer_operations(name: str) -> None:
    cut, layer, operands = parts(name)
    arrays = cut.kept(layer, SHAPE, *operands)
    assert sum(arrays.wanted) > 2
    found: list[Any] = []
    operations = []
    for wanted in ((), arrays.wanted):
        result = jax.jit(cut.layer(layer, SHAPE, wanted))(*operands)
        assert len(result.kept) == (sum(wanted) if wanted else 0)
        assert sum(array.nbytes for array in result.kept) == (arrays.size if wanted else 0)
        change = jnp.cos(jnp.arange(result.x.size, dtype=jnp.float32)).reshape(result.x.shape)
        pairs = operands[1]
        before = change, (), jax.tree.map(jnp.zeros_like, pairs), result.kept
        back = jax.jit(cut.layer_back(layer, SHAPE, wanted)).lower(*before, *operands, result.keys).compile()
        costs: Any = back.cost_analysis()
        operations.append(costs["flops"])
        found.append((result.x, *back(*before, *operands, result.keys)))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        assert np.abs(one).max() > 0
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(np.abs(one).max()))
    assert operations[1] < operations[0]


@pytest.mark.parametrize(("name", "modules"), by_default([("llama", "q_proj"), ("qwen3-moe", "all"), ("ling3", "all")]))
def test_the_plan_says_what_layers_keep(name: str, modules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of all products are kept, trained or not; experts keep a row for each of their tokens."""
    model = checkpoints.case(name)
    matrices = trained_matrices(model.config, modules)
    cut = TrainingCut.of(model.graph, model.leaves, matrices, 0.5)
    trainer = Trainer(TuningPrograms(None), cut, matrices, 4)  # type: ignore[arg-type]
    operands = parts(name)[2]
    kept = 0
    for layer in range(model.config.num_layers):
        leaves = tuple(model.leaves[index] for index in cut.cut.layers[layer])
        pairs = {
            matrix.name: Pair(*(jnp.asarray(leaf) for leaf in pair))
            for matrix, pair in zip(matrices, initial_pairs(matrices, 4, 0), strict=True)
            if matrix.layer == layer
        }
        kept += cut.kept(layer, SHAPE, leaves, pairs, *operands[2:]).size
    monkeypatch.setattr(memory.memory, "device_available", lambda: None)
    assert kept <= trainer.need(SHAPE).kept <= 1.4 * kept


def test_as_many_layers_keep_their_results_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are the same for none, some and all of them."""
    options: Any = {"dtype": "float32", "max_requests": 2, "max_model_len": 64, "precompile": "lazy"}
    data, losses, kept = [list(range(3, 40)), list(range(90, 110))], list[list[float]](), list[int]()
    forward = Trainer._forward

    def counting(self: Trainer, *own: Any, **more: Any) -> Any:
        passed = yield from forward(self, *own, **more)
        kept[-1] = sum(bool(arrays) for arrays in passed.kept)
        return passed

    monkeypatch.setattr(Trainer, "_forward", counting)
    for room in (0, 1 << 20, 1 << 30):
        monkeypatch.setattr(memory, "KEPT", room)
        kept.append(-1)
        with rekindle.open_sync("tiny", disk_memory=0, quiet=True, **options) as session:
            run = session.tune("mine", data, rank=2, steps=3, batch=2, learning_rate=1e-2)
            run.result_sync()
            losses.append([step.loss for step in run.history])
    layers = kept[2]
    assert kept[0] == 0 < kept[1] < layers, kept
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)
