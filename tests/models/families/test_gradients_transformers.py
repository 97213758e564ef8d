"""Gradients of every family against those of PyTorch on the same weights, in float32."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from golden.make import PROMPT
from helpers import checkpoints
from helpers.thorough import by_default
from rekindle._src.capabilities.gradients.request import Point, ResolvedObjective
from rekindle._src.capabilities.gradients.step import GradientKey, arguments_of, program_of

pytest.importorskip("torch")
pytest.importorskip("transformers")

TOLERANCE = 1e-4
FIRST, SECOND = 5, 7
QUICK = {"llama", "qwen3", "gpt2", "gemma2", "mixtral", "lfm2"}


def of_torch(folder: Path) -> tuple[float, list[Any]]:
    """The difference of two logits after the prompt, and its gradient at each of transformers' hidden states."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    out = model(torch.tensor([PROMPT]), output_hidden_states=True)
    for state in out.hidden_states:
        state.retain_grad()
    value = out.logits[0, -1, FIRST] - out.logits[0, -1, SECOND]
    value.backward()
    return float(value), [state.grad[0].numpy() for state in out.hidden_states]


@pytest.mark.filterwarnings("ignore")  # transformers deprecates as it likes
@pytest.mark.parametrize("name", by_default(list(checkpoints.ONE_EACH.values()), lambda name: name in QUICK))
def test_gradients_are_those_of_torch(name: str) -> None:
    """With padding after the prompt. The embeddings' gradient comes through all that reads them."""
    raw = checkpoints.CASES[name]
    checkpoints.needs_transformers(raw)
    state = checkpoints.tensors(raw, seed=7)
    model = checkpoints.model(raw, state)
    with tempfile.TemporaryDirectory() as folder:
        value, expected = of_torch(checkpoints.write(Path(folder), raw, state))
    layers = model.config.num_layers
    points: tuple[Point, ...] = ("embedding", 0), *(("residual", layer) for layer in range(layers - 1)), ("norm", 0)
    length = len(PROMPT)
    key = GradientKey(32, points, (), difference=True)
    objective = ResolvedObjective((FIRST, SECOND), length - 1, difference=True)
    operands = arguments_of(np.asarray(PROMPT), objective, (), model.config.hidden_size, key.size)
    found, gradients = jax.jit(program_of(model.graph, key))(model.leaves, operands)
    assert abs(float(found) - value) < TOLERANCE * max(1.0, abs(value))
    assert len(expected) == len(points)
    for index, (point, right) in enumerate(zip(points, expected, strict=True)):
        gradient = np.asarray(gradients[str(index)])
        scale = np.abs(right).max()
        assert scale > 0
        assert np.abs(gradient[:length] - right).max() < TOLERANCE * scale, point
        assert not gradient[length:].any(), "padding has no influence"
