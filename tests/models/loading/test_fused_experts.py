"""Checkpoints with all experts of a layer in one tensor: interleaved or not, transposed or not, in MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers import checkpoints
from helpers.quantized_checkpoints import MXFP4_RAW, four_bits, write_mxfp4
from rekindle._src.models.loading import reading
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.loading.gguf.blocks import BY_NAME, dequantize
from rekindle._src.opening.exporting import export
from rekindle.errors import CheckpointError, UnsupportedModel
from rekindle_kernels import int4, unavailable_reason

KIND = "fp4-32"
native = unavailable_reason("cpu") is None


def test_four_bit_floats_stand_for_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "UNPACKED", 4 * 64 * 13)  # pieces that begin anywhere
    expected = checkpoints.model(MXFP4_RAW, write_mxfp4(tmp_path))
    found = load(tmp_path, dtype="float32")
    checkpoints.assert_same(found, expected)


def test_transformers_reads_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    import torch

    parts, values = four_bits(np.random.default_rng(2), 2, 16, 64)
    theirs = convert(*(torch.from_numpy(parts[end]) for end in ("_blocks", "_scales")), dtype=torch.float32)
    np.testing.assert_array_equal(theirs.numpy().swapaxes(1, 2), values)


@pytest.mark.skipif(not native, reason="groups are kept where native kernels are")
def test_four_bit_floats_are_kept_in_groups(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    kept = load(tmp_path)
    kinds = dict(kept.graph.precision.kinds)
    assert {kinds[f"layers.0.mlp.{name}"] for name in ("gate_up", "down")} == {KIND}
    plain = load(tmp_path, dtype="float32")
    leaves, numbers = (dict(zip(model.graph.paths, model.leaves, strict=True)) for model in (kept, plain))
    for name in ("gate_up", "down"):
        weight, scale = (leaves[f"layers.1.mlp.{name}.{part}"] for part in ("weight", "scale"))
        np.testing.assert_array_equal(int4.dequantized(weight, scale, None), numbers[f"layers.1.mlp.{name}.weight"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"down_proj_scales": np.zeros((3, 64, 2), np.uint8)}, r"down_proj_scales is U8 \[3, 64, 2\], expected U8"),
        ({"down_proj_blocks": np.zeros((3, 64, 3, 8), np.uint8)}, r"down_proj_blocks is U8 \[3, 64, 3, 8\], expected"),
        ({"down_proj_blocks": np.zeros((2, 64, 3, 16), np.uint8), "down_proj_scales": np.zeros((2, 64, 3), np.uint8)},
         "expected more than 2 experts"),
        ({"down_proj_blocks": np.zeros((3, 32, 3, 16), np.uint8), "down_proj_scales": np.zeros((3, 32, 3), np.uint8)},
         r"experts\.0\.down_proj\.weight"),
    ],
)  # fmt: skip
def test_tensors_of_other_shapes_are_named(change: dict[str, NDArray[Any]], named: str, tmp_path: Path) -> None:
    write_mxfp4(tmp_path, {f"model.layers.1.mlp.experts.{name}": value for name, value in change.items()})
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path)


@pytest.mark.parametrize("case", ["gpt-oss", "qwen3.5-moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_come_from_their_places(case: str, dtype: str, tmp_path: Path) -> None:
    raw = checkpoints.CASES[case]
    state = checkpoints.tensors(raw)
    assert not any(".experts.0." in name for name in checkpoints.fused(raw, state)), "they are in one tensor"
    found = load(checkpoints.write(tmp_path, raw, state, dtype=dtype), dtype="float32")
    rounded = {name: value.astype(checkpoints.DTYPES[dtype]).astype(np.float32) for name, value in state.items()}
    expected = checkpoints.model(raw, rounded)
    checkpoints.assert_same(found, expected)


def test_a_file_of_llama_cpps_blocks_is_the_same_model(tmp_path: Path) -> None:
    """The same numbers in GGUF's order of nibbles."""
    parts, values = four_bits(np.random.default_rng(3), 1, 16, 64)
    blocks = np.zeros((16, 2), BY_NAME["MXFP4"].layout)
    levels = np.stack([parts["_blocks"] & 15, parts["_blocks"] >> 4], axis=-1).reshape(16, 2, 32)
    blocks["low"] = levels[..., :16] | levels[..., 16:] << 4
    blocks["scale"] = parts["_scales"][0]
    np.testing.assert_array_equal(dequantize(BY_NAME["MXFP4"], blocks.reshape(-1)).reshape(16, 64), values[0])


def test_a_folder_that_transformers_could_not_read_is_not_written(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    with pytest.raises(UnsupportedModel, match="all experts of a layer in one tensor"):
        export(tmp_path, tmp_path / "out")
