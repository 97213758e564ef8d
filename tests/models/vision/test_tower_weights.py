"""The weights of encoders: published names, differences as one typed error, files and arrays alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.towers import MODELS, config_of, random_tensors
from rekindle._src.models.loading.tensor_files import read_header
from rekindle._src.models.vision.registry import tower_family, tower_manifest
from rekindle._src.models.vision.tower import abstract_tower
from rekindle._src.models.vision.weights import TowerTensors, checked, load_tower, read_tower, tower_tensors
from rekindle.errors import CheckpointError


def stored(name: str, state: dict[str, Any]) -> TowerTensors[Any]:
    return tower_tensors(config_of(name), state, "/models/some")


@pytest.mark.parametrize("name", MODELS)
def test_a_manifest_has_every_parameter_and_nothing_else(name: str) -> None:
    config = config_of(name)
    assert set(tower_manifest(config).sources) == set(abstract_tower(config).graph.paths)
    own = {part for source in tower_manifest(config).sources.values() for part in source.names}
    beginnings = tower_family(config.model_type).beginnings
    assert all(tensor.startswith(tuple(own for _, own in beginnings)) for tensor in own)


# What the families' published checkpoints, and those that transformers saves, call a tensor.
NAMES = [
    ("qwen3_vl", "model.visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight"),
    ("qwen3_vl", "visual.deepstack_merger_list.1.norm.bias", "visual.deepstack_merger_list.1.norm.bias"),
    ("gemma4", "model.vision_tower.patch_embedder.input_proj.weight", "vision_tower.patch_embedder.input_proj.weight"),
    ("gemma4", "model.embed_vision.embedding_projection.weight", "embed_vision.embedding_projection.weight"),
    ("gemma4_unified", "model.vision_embedder.patch_ln1.bias", "vision_embedder.patch_ln1.bias"),
    ("gemma4_unified", "model.embed_vision.pos_embedding", "vision_embedder.pos_embedding"),
    (
        "gemma4_unified", "model.embed_vision.multimodal_embedder.embedding_projection.weight",
        "embed_vision.embedding_projection.weight",
    ),
    ("smolvlm", "model.connector.modality_projection.proj.weight", "connector.modality_projection.proj.weight"),
    ("smolvlm", "model.vision_model.post_layernorm.weight", "vision_model.post_layernorm.weight"),
    ("gemma3", "vision_tower.vision_model.post_layernorm.weight", "vision_tower.post_layernorm.weight"),
    ("gemma3", "model.vision_tower.post_layernorm.weight", "vision_tower.post_layernorm.weight"),
    (
        "gemma3", "model.multi_modal_projector.mm_input_projection_weight",
        "multi_modal_projector.mm_input_projection_weight",
    ),
    (
        "lfm2_vl", "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.bias",
        "vision_tower.encoder.layers.0.mlp.fc1.bias",
    ),
    ("lfm2_vl", "multi_modal_projector.linear_1.weight", "multi_modal_projector.linear_1.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "theirs", "own"), NAMES)
def test_names_of_published_checkpoints(model: str, theirs: str, own: str) -> None:
    config = config_of(model)
    padding = {f"lm_head.{number}": np.zeros(1) for number in range(8)}
    assert list(tower_tensors(config, {**padding, theirs: np.zeros(1)}, "").tensors) == [own]
    assert any(own in source.names for source in tower_manifest(config).sources.values())


def test_differences_are_one_error_with_the_checkpoints_own_names() -> None:
    state = random_tensors(config_of("qwen3_vl"))
    del state["model.visual.merger.norm.bias"]
    state["model.visual.pos_embed.weight"] = state["model.visual.pos_embed.weight"][:-1]
    state["model.visual.blocks.7.norm1.weight"] = np.zeros(3, np.float32)
    state["model.language_model.embed_tokens.weight"] = np.zeros((3, 3), np.float32)  # another part's
    with pytest.raises(CheckpointError) as raised:
        load_tower(abstract_tower(config_of("qwen3_vl")), stored("qwen3_vl", state))
    text = str(raised.value)
    assert "/models/some does not hold the encoder of pictures of the qwen3_vl model" in text
    assert "3 differences" in text
    assert "missing: visual.merger.norm.bias [32]" in text
    assert "model.visual.pos_embed.weight: shape [35, 32], expected [36, 32]" in text
    assert "unexpected: model.visual.blocks.7.norm1.weight" in text
    assert "language_model" not in text


def test_one_tensor_under_two_names_is_refused() -> None:
    state = random_tensors(config_of("qwen3_vl"))
    state["visual.pos_embed.weight"] = state["model.visual.pos_embed.weight"]
    with pytest.raises(CheckpointError, match=r"two tensors for visual\.pos_embed\.weight"):
        stored("qwen3_vl", state)


def test_more_layers_than_tensors_are_refused_before_they_are_made() -> None:
    with pytest.raises(CheckpointError, match="3 layers, and the weights are 1 tensors"):
        stored("qwen3_vl", {"model.visual.pos_embed.weight": np.zeros((36, 32))})


def test_heads_for_other_tasks_are_left_out() -> None:
    state = random_tensors(config_of("gemma3"))
    state["vision_tower.vision_model.head.probe"] = np.zeros((1, 1, 32), np.float32)
    assert checked(abstract_tower(config_of("gemma3")), stored("gemma3", state))


def test_kernels_of_convolutions_are_matrices_and_other_shapes_are_not_guessed() -> None:
    config = config_of("qwen3_vl")
    state = random_tensors(config)
    tower, name = abstract_tower(config), "model.visual.patch_embed.proj.weight"
    flat = load_tower(tower, stored("qwen3_vl", state))
    kernel = {**state, name: state[name].reshape(32, 3, 2, 4, 4)}
    for one, other in zip(flat, load_tower(tower, stored("qwen3_vl", kernel)), strict=True):
        np.testing.assert_array_equal(one, other)
    for shape in ((3, 2, 4, 4, 32), (96, 32), (32, 4, 24)):
        with pytest.raises(CheckpointError, match=r"expected \[32, 96\]"):
            load_tower(tower, stored("qwen3_vl", {**state, name: state[name].reshape(shape)}))


@pytest.mark.parametrize("name", ["smolvlm", "gemma3", "gemma4-clipped"])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
def test_files_are_read_as_arrays_are(name: str, dtype: str, tmp_path: Path) -> None:
    """Fused, transposed, shifted and scalar tensors, and kernels of convolutions, in 16 bits as they are published."""
    config, state = config_of(name), random_tensors(config_of(name))
    if name == "smolvlm":
        kernel = "model.vision_model.embeddings.patch_embedding.weight"
        state[kernel] = state[kernel].reshape(32, 3, 4, 4)
    if name == "gemma4-clipped":
        state = {key: value.reshape(()) if value.shape == (1,) else value for key, value in state.items()}
    narrow = {key: value.astype(ml_dtypes.bfloat16) for key, value in state.items()}
    save_file({**narrow, "lm_head.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    entries = {entry.name: entry for entry in read_header(tmp_path / "model.safetensors").entries}
    tower = abstract_tower(config, dtype)
    read = read_tower(tower, tower_tensors(config, entries, str(tmp_path)))
    loaded = load_tower(tower, stored(name, narrow))
    for path, one, other, shape in zip(tower.graph.paths, read, loaded, tower.shapes, strict=True):
        assert one.dtype == other.dtype == shape.dtype, path
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32), err_msg=path)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    config = config_of("smolvlm")
    state: dict[str, Any] = random_tensors(config)
    state["model.vision_model.post_layernorm.bias"] = np.zeros(32, np.int32)
    save_file(state, tmp_path / "model.safetensors")
    entries = {entry.name: entry for entry in read_header(tmp_path / "model.safetensors").entries}
    with pytest.raises(CheckpointError, match=r"post_layernorm\.bias: stored as I32, expected one of"):
        read_tower(abstract_tower(config), tower_tensors(config, entries, str(tmp_path)))
