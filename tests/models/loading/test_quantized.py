"""Checkpoints that are quantised already: AWQ, GPTQ, compressed-tensors and fp8 stand for what their formulas say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import checkpoints
from helpers.quantized_checkpoints import AWQ, GPTQ, KINDS, RAW, group_config, write
from rekindle._src.models.loading import checkpoint, reading
from rekindle._src.models.loading.checkpoint import load
from rekindle._src.models.registry import config_from_hf
from rekindle._src.opening.exporting import export
from rekindle.errors import CheckpointError, UnsupportedModel


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_stands_for_what_its_formula_says(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "UNPACKED", 4 * 64 * 13)  # pieces that begin within words and blocks
    expected = checkpoints.model(RAW, write(tmp_path, kind))
    found = load(tmp_path, dtype="float32")
    checkpoints.assert_same(found, expected)


def test_experts_are_read_too(tmp_path: Path) -> None:
    raw = checkpoints.CASES["qwen3-moe"] | {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    expected = checkpoints.model(raw, write(tmp_path, "AWQ", raw))
    found = load(tmp_path, dtype="float32")
    checkpoints.assert_same(found, expected)


@pytest.mark.parametrize("kind", ["AWQ", "fp8 in blocks"])
def test_it_can_be_exported(kind: str, tmp_path: Path) -> None:
    expected = checkpoints.model(RAW, write(tmp_path / "folder", kind))
    for out, kind in (("model.gguf", "f32"), ("plain", "f32")):
        made = load(export(tmp_path / "folder", tmp_path / out, type=kind), dtype="float32")
        checkpoints.assert_same(made, expected)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("gptq", "quantization_config holds 'gptq'"),
        ({"quant_method": "bitsandbytes"}, r"quant_method='bitsandbytes'.*awq, compressed-tensors, fbgemm_fp8, fp8"),
        (AWQ | {"version": "gemv"}, r"quantization_config\.version='gemv'.*'gemm'"),
        (AWQ | {"bits": 3}, r"quantization_config\.bits=3"),
        (AWQ | {"group_size": 0}, r"quantization_config\.group_size=0"),
        (GPTQ | {"bits": 3}, r"quantization_config\.bits=3.*2, 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, r"checkpoint_format='marlin'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        ({"quant_method": "fp8", "fmt": "int8"}, r"fmt='int8'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, r"quant_algo='W4A16_AWQ'.*'FP8', 'NVFP4'"),
        (group_config("marlin-24"), r"config_groups\.group_0\.format='marlin-24'"),
        (group_config("pack-quantized", num_bits=2), r"group_0\.weights\.num_bits=2"),
        (group_config("pack-quantized", num_bits=4, strategy="tensor"), r"group_0\.weights\.strategy='tensor'"),
        (group_config("int-quantized", num_bits=8, symmetric=False), r"group_0\.weights\.symmetric=False"),
        (group_config("int-quantized", num_bits=8) | {"sparsity_config": {"format": "bitmask"}}, r"format='bitmask'"),
        (group_config("int-quantized", num_bits=8) | {"transform_config": {"a": 1}}, "transform_config"),
        ({"quant_method": "compressed-tensors"}, r"config_groups holds None"),
    ],
)
def test_a_variant_that_is_not_read_names_the_field(config: Any, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        config_from_hf(RAW | {"quantization_config": config})


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("AWQ", {"group_size": 64}, r"self_attn\.\w_proj\.scales is F16 \[2, \d+\], expected .* \[1, "),
        ("GPTQ", {"bits": 8}, r"proj\.(scales|qzeros) is"),
        ("packed", {"quant_method": "awq"}, r"missing: .*_proj\.weight"),
        ("fp8 in blocks", {"weight_block_size": None}, r"weight_scale_inv is F32"),
    ],
)
def test_tensors_that_are_not_those_of_the_config_are_named(
    kind: str, change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write(tmp_path, kind)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=named):
        checkpoint.describe(tmp_path)


@pytest.mark.parametrize(
    "kind", ["packed", "packed with zeros", "packed in 8 bits", "int8 by channel", "fp8 by channel"]
)
def test_compressed_tensors_says_the_same(kind: str, tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="the oracle, with torch")
    torch = pytest.importorskip("torch")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from safetensors.torch import load_file

    state = write(tmp_path, kind)
    form = KINDS[kind][0]["format"]
    arguments = QuantizationArgs(**KINDS[kind][0]["config_groups"]["group_0"]["weights"])
    compressor = compressors.BaseCompressor.load_from_registry(form)
    base = "model.layers.1.self_attn.k_proj"
    stored = {
        name.rpartition(".")[2]: value
        for name, value in load_file(tmp_path / "model.safetensors").items()
        if base in name
    }
    for name in ("weight_scale",):
        stored[name] = stored[name].to(torch.float32)
    try:
        theirs = compressor.decompress_weight(compressed_data=stored, quantization_args=arguments)
    except (TypeError, AttributeError):
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        theirs = compressor.decompress(stored, scheme)["weight"]
    np.testing.assert_array_equal(theirs.to(torch.float32).numpy(), state[f"{base}.weight"])
