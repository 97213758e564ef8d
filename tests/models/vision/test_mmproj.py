"""Encoders in GGUF files: the same as the checkpoint that llama.cpp's converter makes them from.

`converted` does what the converter does, tensor by tensor, with the names of llama.cpp's own table.
"""

from __future__ import annotations

import collections
import functools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers import header_fuzz
from helpers.thorough import by_default
from helpers.towers import MODELS, config_of, random_tensors
from rekindle._src.models.loading import tensor_files
from rekindle._src.models.loading.gguf import rows
from rekindle._src.models.loading.gguf.blocks import BY_NAME
from rekindle._src.models.loading.gguf.export import OutgoingTensor, write_gguf
from rekindle._src.models.loading.gguf.header import forget_headers, read_header
from rekindle._src.models.loading.gguf.rewrites import TensorRewrite
from rekindle._src.models.loading.gguf.rows import entry_of
from rekindle._src.models.loading.tensor_files import read_exactly
from rekindle._src.models.vision.mmproj import is_mmproj, read_mmproj
from rekindle._src.models.vision.tower import abstract_tower
from rekindle._src.models.vision.weights import load_tower, read_tower, tower_tensors
from rekindle.errors import CheckpointError, UnsupportedModel

Pieces = Iterator[tuple[str, NDArray[Any]]]


@functools.cache
def table() -> Any:
    gguf = pytest.importorskip("gguf")
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)


def table_name(name: str, parts: tuple[str, ...] = (".weight", ".bias")) -> str:
    """llama.cpp's name of a tensor, from the table of its package."""
    known = table().get_name(name, try_suffixes=parts)
    assert known is not None, name
    return str(known)


def qwen(name: str, tensor: NDArray[Any], model: dict[str, Any]) -> Pieces:
    name = name.replace("model.visual.", "visual.")
    if (match := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)\.(\w+)", name)) is not None:
        layer = model["vision_config"]["deepstack_visual_indexes"][int(match[1])]
        yield f"v.deepstack.{layer}.{match[2]}.{match[3]}", tensor
    elif name.startswith("visual.merger."):
        yield re.sub(r"visual\.merger\.(norm|linear_fc1|linear_fc2)", lambda part: {
            "norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2",
        }[part[1]], name), tensor  # fmt: skip
    elif name == "visual.patch_embed.proj.weight":
        kernel = tensor.reshape(-1, 3, 2, 4, 4)
        yield "v.patch_embd.weight", kernel[:, :, 0]
        yield "v.patch_embd.weight.1", kernel[:, :, 1]
    else:
        yield table_name(name), tensor


def last_channels_first(tensor: NDArray[Any], side: int) -> NDArray[Any]:
    return tensor.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)


def gemma4(name: str, tensor: NDArray[Any], model: dict[str, Any]) -> Pieces:
    name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    name += ".weight" if name.endswith("position_embedding_table") else ""
    if name.endswith("input_proj.weight"):
        tensor = last_channels_first(tensor, 4)
    ends = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
    yield table_name(name, ends), tensor


def gemma4_unified(name: str, tensor: NDArray[Any], model: dict[str, Any]) -> Pieces:
    """Its names are newer than the package's table."""
    module, _, part = name.removeprefix("model.").rpartition(".")
    side = 6
    if name.endswith("pos_embedding"):
        yield "v.position_embd.weight", tensor.transpose(1, 0, 2)
        return
    if ".patch_dense.weight" in name or ".patch_ln1." in name:
        tensor = last_channels_first(tensor, side).reshape(tensor.shape)
    names = {
        "vision_embedder.patch_ln1": "v.patch_norm.1", "vision_embedder.patch_dense": "v.patch_embd",
        "vision_embedder.patch_ln2": "v.patch_norm.2", "vision_embedder.pos_norm": "v.patch_norm.3",
        "embed_vision.embedding_projection": "mm.input_projection",
    }  # fmt: skip
    yield f"{names[module]}.{part}", tensor


def siglip(name: str, tensor: NDArray[Any], model: dict[str, Any]) -> Pieces:
    if model["model_type"] == "lfm2_vl":
        name = name.replace("model.vision_tower.", "vision_tower.").replace("model.multi_modal", "multi_modal")
    name = name.replace("mm_input_projection_weight", "mm_input_projection.weight")
    if "soft_emb_norm.weight" in name:
        tensor = tensor + 1
    if "patch_embedding.weight" in name:
        tensor = last_channels_first(tensor, 4) if model["model_type"] == "lfm2_vl" else tensor.reshape(-1, 3, 4, 4)
    yield table_name(name), tensor


def keys(name: str) -> dict[str, Any]:
    """The metadata that the converter writes."""
    model = MODELS[name]
    vision, common = model["vision_config"], {"general.architecture": "clip", "clip.has_vision_encoder": True}
    own: dict[str, Any] = {
        "embedding_length": vision.get("hidden_size", vision.get("mm_embed_dim")),
        "feed_forward_length": vision.get("intermediate_size", 0),
        "block_count": vision.get("num_hidden_layers", vision.get("depth", 0)),
        "attention.head_count": vision.get("num_attention_heads", vision.get("num_heads", 0)),
        "attention.layer_norm_epsilon": 1e-6,
        "patch_size": vision["patch_size"],
        "image_size": vision.get("image_size", 24),
        "projection_dim": 24,
    }
    if model["model_type"].startswith("qwen"):
        own |= {"attention.layer_norm_epsilon": 3e-5, "spatial_merge_size": 2}  # the language model's epsilon
        layers = vision.get("deepstack_visual_indexes", ())
        own["is_deepstack_layers"] = [layer in layers for layer in range(own["block_count"])]
    if model["model_type"] in ("smolvlm", "idefics3"):
        own |= {"attention.layer_norm_epsilon": 1e-5, "projector.scale_factor": model["scale_factor"]}
    if model["model_type"] == "lfm2_vl":
        own["projector.scale_factor"] = model.get("downsample_factor", 2)
    if model["model_type"] == "gemma3":
        own["projector.scale_factor"] = 2
    projector, several = {
        "qwen3_vl": ("qwen3vl_merger", False), "qwen3_5": ("qwen3vl_merger", False), "gemma4": ("gemma4v", True),
        "gemma4_unified": ("gemma4uv", True), "smolvlm": ("idefics3", False), "idefics3": ("idefics3", False),
        "gemma3": ("gemma3", False), "lfm2_vl": ("lfm2", False),
    }[model["model_type"]]  # fmt: skip
    common["clip.vision.projector_type" if several else "clip.projector_type"] = projector
    return common | {f"clip.vision.{key}": value for key, value in own.items()}


CONVERTERS = {
    "qwen3_vl": qwen, "qwen3_5": qwen, "gemma4": gemma4, "gemma4_unified": gemma4_unified, "smolvlm": siglip,
    "idefics3": siglip, "gemma3": siglip, "lfm2_vl": siglip,
}  # fmt: skip

# Frames and levels; clip bounds and channels by pixel; swapped axes; a transposed matrix and a shifted norm.
ONE_OF_EACH_KIND = ("qwen3_vl", "gemma4-clipped", "gemma4_unified", "gemma3")


def converted(name: str, state: dict[str, NDArray[Any]], path: Path, kind: str = "F32", **other: Any) -> Path:
    """Write the file that the converter makes of a checkpoint, matrices in a type."""
    model, tensors, pieces = MODELS[name], [], []
    for theirs, values in state.items():
        for own, tensor in CONVERTERS[model["model_type"]](theirs, values, model):
            stored = BY_NAME[kind if tensor.ndim > 1 else "F32"]
            tensors.append(OutgoingTensor(own, stored, tensor.shape))
            pieces.append(np.ascontiguousarray(tensor, stored.layout))
    if "sounds" in other:
        tensors.append(OutgoingTensor("mm.a.fc.weight", BY_NAME["F32"], (2, 2)))
        pieces.append(np.zeros((2, 2), np.float32))
    write_gguf(path, keys(name) | other, tensors, pieces)
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if name in ONE_OF_EACH_KIND and kind == "F32" else pytest.mark.thorough)
        for name in MODELS
        for kind in ("F32", "F16")
    ],
)
def test_a_file_holds_the_same_encoder_as_its_checkpoint(name: str, kind: str, tmp_path: Path) -> None:
    state = {
        key: values.astype(np.float16).astype(np.float32) if kind == "F16" else values
        for key, values in random_tensors(config_of(name)).items()
    }
    stored = read_mmproj(converted(name, state, tmp_path / "mmproj.gguf", kind, sounds=1))
    tower = abstract_tower(stored.config)
    config = config_of(name)
    expected = load_tower(abstract_tower(config), tower_tensors(config, state, "a checkpoint"))
    assert tower.graph.paths == abstract_tower(config).graph.paths
    for path, one, other in zip(tower.graph.paths, read_tower(tower, stored), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-7, err_msg=path)
    same = {
        field: (getattr(stored.config, field), getattr(config, field))
        for field in config.__dataclass_fields__
        if field != "model_type" and getattr(stored.config, field) != getattr(config, field)
    }
    assert not same, "a number of the encoder came out another"


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma4_unified"])
@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_no_byte_of_a_file_is_read_again_for_each_piece(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An author decides how large a tensor is, and so how many pieces it has."""
    read = collections.Counter[str]()

    def counting(path: Path, tensor: str, offset: int, out: NDArray[Any]) -> None:
        read[tensor] += out.nbytes
        read_exactly(path, tensor, offset, out)

    monkeypatch.setattr(rows, "read_exactly", counting)
    monkeypatch.setattr(tensor_files, "read_exactly", counting)
    stored = read_mmproj(converted(name, random_tensors(config_of(name)), tmp_path / "mmproj.gguf", kind))
    for entry in stored.tensors.values():
        whole = tensor_files.rows_of(entry, 0, entry.shape[0])
        read.clear()
        pieces = [tensor_files.rows_of(entry, row, row + 1) for row in range(entry.shape[0])]
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
        assert read.total() <= entry.nbytes, entry.name


def test_the_epsilon_of_the_language_model_is_not_the_encoders(tmp_path: Path) -> None:
    """The converter writes it there; and another one than transformers' where SmolVLM's checkpoint has none."""
    for name in ("qwen3_vl", "smolvlm"):
        path = converted(name, random_tensors(config_of(name)), tmp_path / f"{name}.gguf")
        assert read_header(path).metadata.number("clip.vision.attention.layer_norm_epsilon") != 1e-6
        assert read_mmproj(path).config.norm_eps == 1e-6


def test_missing_and_unexpected_tensors_have_llama_cpps_names(tmp_path: Path) -> None:
    state = random_tensors(config_of("qwen3_vl"))
    del state["model.visual.blocks.1.norm2.bias"], state["model.visual.deepstack_merger_list.1.linear_fc1.bias"]
    stored = read_mmproj(converted("qwen3_vl", state, tmp_path / "mmproj.gguf"))
    stored.tensors["v.blk.9.ln1.weight"] = next(iter(stored.tensors.values()))  # type: ignore[index]
    with pytest.raises(CheckpointError) as raised:
        read_tower(abstract_tower(stored.config), stored)
    for part in ("missing: v.blk.1.ln2.bias", "missing: v.deepstack.2.fc1.bias", "unexpected: v.blk.9.ln1.weight"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"clip.projector_type": "resampler"}, "projector_type='resampler' is not implemented. Use one of: gemma3"),
        ({"general.architecture": "llama"}, "is not implemented"),
        ({"clip.vision.block_count": 2000}, "block_count=2000"),
        ({"clip.vision.embedding_length": 1 << 30}, "hidden_size=1073741824"),
        ({"clip.vision.attention.head_count": 0}, "num_heads=0"),
        ({"clip.vision.spatial_merge_size": -2}, "spatial_merge_size=-2"),
        ({"clip.vision.is_deepstack_layers": 3}, "wrong kind"),
        ({"clip.vision.patch_size": "16"}, "patch_size"),
    ],
)
def test_files_that_are_not_as_they_should_be(other: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = converted("qwen3_vl", random_tensors(config_of("qwen3_vl")), tmp_path / "mmproj.gguf", **other)
    with pytest.raises((CheckpointError, UnsupportedModel), match=message):
        read_mmproj(path)


def test_a_file_without_a_tensor_that_says_a_size(tmp_path: Path) -> None:
    state = random_tensors(config_of("qwen3_vl"))
    del state["model.visual.pos_embed.weight"]
    path = converted("qwen3_vl", state, tmp_path / "mmproj.gguf")
    assert is_mmproj(read_header(path))
    with pytest.raises(CheckpointError, match=r"v\.position_embd\.weight is missing"):
        read_mmproj(path)


def test_a_vector_in_blocks_is_refused_by_its_name(tmp_path: Path) -> None:
    """It has rows of one number, which are no whole blocks."""
    path = converted("qwen3_vl", random_tensors(config_of("qwen3_vl")), tmp_path / "mmproj.gguf")
    entry = next(one for one in read_mmproj(path).tensors.values() if one.shape == (32,))
    with pytest.raises(
        CheckpointError, match=r"of shape \[32\] is stored as Q4_1, and its rows are not made of blocks"
    ):
        entry_of("bias", entry._replace(dtype="Q4_1", rows=None), TensorRewrite())


@pytest.mark.parametrize("count", [12, pytest.param(400, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", by_default(ONE_OF_EACH_KIND, lambda name: name in ("qwen3_vl", "gemma3")))
def test_a_mutated_header_is_read_or_refused_by_a_typed_error(name: str, count: int, tmp_path: Path) -> None:
    path = converted(name, random_tensors(config_of(name)), tmp_path / "mmproj.gguf")
    data = path.read_bytes()
    fields, keyed, end = header_fuzz.fields_of(data)
    results = collections.Counter[str]()
    for number in range(count):
        draw = random.Random(f"{name} {number}")
        path.write_bytes(header_fuzz.mutated(data[:end], fields, keyed, draw) + data[end:])
        forget_headers()
        try:
            stored = read_mmproj(path)
            read_tower(abstract_tower(stored.config), stored)
        except (CheckpointError, UnsupportedModel):
            results["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"mutation {number}: {error!r}") from error
        else:
            results["read"] += 1
    assert results["refused"] > count // 4 and results["read"] >= count // 50, results
