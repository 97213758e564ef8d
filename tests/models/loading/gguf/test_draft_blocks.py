"""Files with blocks that draft tokens: `block_count` includes them, and no family takes them for layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers import checkpoints, gguf_files
from helpers.thorough import by_default
from rekindle._src.models.loading import checkpoint
from rekindle._src.models.loading.gguf.blocks import F32
from rekindle._src.models.loading.gguf.export import OutgoingTensor, export, write_gguf
from rekindle._src.models.loading.gguf.header import read_header
from rekindle._src.models.loading.stored import look
from rekindle._src.models.registry import config_from_hf
from rekindle.errors import CheckpointError

CASES = checkpoints.CASES
HELD = {case: change for family in checkpoints.FAMILY_CASES.values() for case, change in family.held.items()}
FIRST = ["llama", *(case for case in HELD if case != "llama")]
DRAFTS = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm", "attn_q", "attn_norm", "ffn_up")


def with_drafts(folder: Path, file: Path, blocks: int = 2) -> int:
    """Write a checkpoint as a file with more blocks, as llama.cpp's converter does. Return its number of layers."""
    stored = look(folder)
    config = config_from_hf(stored.raw)
    made = export(stored, config, "f32", lambda count: None)
    prefix, layers = made.metadata["general.architecture"], config.num_layers
    metadata = dict(made.metadata)
    for key, value in metadata.items():
        if isinstance(value, (list, np.ndarray)) and len(value) == layers:
            metadata[key] = [*value, *[value[-1]] * blocks]
    metadata |= {f"{prefix}.block_count": layers + blocks, f"{prefix}.nextn_predict_layers": blocks}
    more = [
        OutgoingTensor(f"blk.{layers + block}.{name}.weight", F32, (4, 4)) for block in range(blocks) for name in DRAFTS
    ]
    pieces = [*made.pieces, *(np.ones((4, 4), np.float32) for _ in more)]
    write_gguf(file, metadata, (*made.tensors, *more), pieces)
    return layers


@pytest.mark.parametrize("case", by_default(FIRST, 8))
def test_blocks_that_draft_are_no_layers(case: str, tmp_path: Path) -> None:
    raw = CASES[case] | HELD[case]
    state = checkpoints.tensors(raw)
    expected = checkpoints.model(raw, state)
    folder = checkpoints.write(tmp_path / "folder", raw, state)
    plain = checkpoint.load(gguf_files.convert(folder, tmp_path / "plain.gguf"), dtype="float32")
    layers = with_drafts(folder, tmp_path / "drafts.gguf")
    found = checkpoint.load(tmp_path / "drafts.gguf", dtype="float32")
    assert found.config == plain.config
    assert found.config.num_layers == layers
    checkpoints.assert_same(found, expected)


@pytest.mark.parametrize("case", by_default(FIRST, 4))
def test_a_file_is_written_again_without_them(case: str, tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "folder", CASES[case] | HELD[case])
    layers = with_drafts(folder, tmp_path / "drafts.gguf")
    again = gguf_files.convert(tmp_path / "drafts.gguf", tmp_path / "again.gguf", "auto")
    plain = gguf_files.convert(folder, tmp_path / "plain.gguf", "auto")
    ours, theirs = read_header(again), read_header(plain)
    assert {tensor.name for tensor in ours.tensors} == {tensor.name for tensor in theirs.tensors}
    prefix = ours.metadata.text("general.architecture")
    assert ours.metadata[f"{prefix}.block_count"] == layers
    assert f"{prefix}.nextn_predict_layers" not in ours.metadata
    for key, value in theirs.metadata.items():
        if not key.startswith("general."):
            np.testing.assert_array_equal(ours.metadata[key], value, err_msg=key)
    assert checkpoint.load(again, dtype="float32").config == checkpoint.load(plain, dtype="float32").config


def test_a_block_too_many_that_does_not_draft_is_an_error(tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "folder", CASES["llama"])
    file = tmp_path / "drafts.gguf"
    with_drafts(folder, file)
    file.write_bytes(file.read_bytes().replace(b".nextn.eh_proj.weight", b".nextn.eh_xxxx.weight"))
    with pytest.raises(CheckpointError, match=r"unexpected: blk\.2\.attn_norm\.weight"):
        checkpoint.load(file)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("qwen3.5", ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight"]),
        ("qwen3.5-moe", ["mtp.fc.weight", "mtp.layers.0.mlp.experts.0.gate_proj.weight"]),
        ("ernie4.5", ["model.mtp_emb_norm.0.weight", "model.mtp_block.0.self_attn.q_proj.weight"]),
        ("glm4-moe-lite", ["model.layers.{}.eh_proj.weight", "model.layers.{}.embed_tokens.weight"]),
        ("deepseek-v2", ["model.layers.{}.eh_proj.weight", "model.layers.{}.shared_head.norm.weight"]),
        ("llama", ["model.layers.{}.eh_proj.weight", "model.layers.{}.self_attn.q_proj.weight"]),
    ],
)
def test_heads_of_folders_are_left_out_by_name(case: str, names: list[str], tmp_path: Path) -> None:
    raw: dict[str, Any] = CASES[case]
    folder = checkpoints.write(tmp_path / "folder", raw)
    expected = checkpoint.load(folder, dtype="float32")
    (file,) = folder.glob("*.safetensors")
    ones = np.ones((4, 4), np.float32)
    more = {name.format(expected.config.num_layers): ones for name in names}
    save_file(load_file(file) | more, file, {"format": "pt"})
    checkpoints.assert_same(checkpoint.load(folder, dtype="float32"), expected)
    save_file(load_file(file) | {f"model.layers.{expected.config.num_layers + 1}.x.weight": ones}, file)
    with pytest.raises(CheckpointError, match="unexpected: "):
        checkpoint.load(folder, dtype="float32")
