"""Weights and layers that are not finite are found and named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers import checkpoints, gguf_files
from rekindle._src.cli.main import main
from rekindle._src.models import diagnosis
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.loading.checkpoint import load

PROMPT = [3, 4, 5, 6, 7, 8]


def spoiled(name: str, path: str, value: float) -> LoadedModel:
    model = checkpoints.case(name)
    leaves = [
        leaf.at[(0,) * leaf.ndim].set(value) if here == path else leaf
        for here, leaf in zip(model.graph.paths, model.leaves, strict=True)
    ]
    return dataclasses.replace(model, leaves=tuple(leaves))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "gemma2", "qwen3-moe", "mistral-window")),
    ],
)
def test_a_sound_model_has_nothing_to_report(name: str) -> None:
    model = checkpoints.case(name)
    assert list(diagnosis.broken_weights(model)) == []
    assert diagnosis.first_broken_stage(model, PROMPT) is None


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "path", "stage"),
    [
        ("llama", "layers.1.mlp.down.weight", "layers.1"),
        ("llama", "layers.0.attention.qkv.weight", "layers.0"),
        ("llama", "norm.weight", "norm"),
        ("llama", "head.weight", "head"),
        ("gpt2", "layers.1.up.bias", "layers.1"),
        ("gpt2", "position_embed.weight", "embed"),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_weight_and_the_first_layer_are_named(name: str, path: str, stage: str, value: float) -> None:
    model = spoiled(name, path, value)
    (weight,) = diagnosis.broken_weights(model)
    assert (weight.path, weight.nans + weight.infinities) == (path, 1)
    assert diagnosis.first_broken_stage(model, PROMPT) == stage


def test_a_layer_that_overflows_with_finite_weights_is_named() -> None:
    model = checkpoints.case("llama")
    leaves = [
        leaf * 1e38 if path in ("layers.1.mlp.gate_up.weight", "layers.1.mlp.down.weight") else leaf
        for path, leaf in zip(model.graph.paths, model.leaves, strict=True)
    ]
    model = dataclasses.replace(model, leaves=tuple(leaves))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in leaves)
    assert list(diagnosis.broken_weights(model)) == []
    assert diagnosis.first_broken_stage(model, PROMPT) == "layers.1"


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_the_doctor_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    folder = checkpoints.write(tmp_path, checkpoints.CASES["qwen3-moe"], dtype=dtype)
    assert main(["doctor", "--model", str(folder)]) == 0
    assert "are finite" in capsys.readouterr().out
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.experts.2.down_proj.weight"][3, 4] = np.nan
    save_file(state, folder / "model.safetensors")
    assert main(["doctor", "--model", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "layers.1.mlp.down.weight holds 1 NaN" in found[0]["detail"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["scale", "minimum"])
def test_a_step_that_is_infinite_is_named(name: str, tmp_path: Path) -> None:
    raw = checkpoints.CASES["llama"] | {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
    model = load(gguf_files.of_types(tmp_path / "model.gguf", raw, lambda name: "Q4_K"))
    assert list(diagnosis.broken_weights(model)) == []
    wanted = f"layers.1.mlp.down.{name}"
    bits = np.frombuffer(np.float16(np.inf).tobytes(), np.int8)  # of the first output, after eight groups of 16
    leaves = [
        leaf.at[0, 128:130].set(bits) if path == wanted else leaf
        for path, leaf in zip(model.graph.paths, model.leaves, strict=True)
    ]
    found = list(diagnosis.broken_weights(dataclasses.replace(model, leaves=tuple(leaves))))
    assert [one.path for one in found] == [wanted]
    assert found[0].nans + found[0].infinities == 8
