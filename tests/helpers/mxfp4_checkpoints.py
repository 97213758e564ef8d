"""Checkpoints of gpt-oss whose experts are in MXFP4, and the numbers that these stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from helpers import checkpoints

RAW = checkpoints.CASES["gpt-oss"] | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16, "num_local_experts": 3,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}  # fmt: skip
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def four_bits(rng: np.random.Generator, *shape: int) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
    """Blocks and scales of matrices [experts, outputs, inputs], and the numbers that they stand for."""
    experts, outputs, inputs = shape
    blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
    scales = rng.integers(118, 125, blocks.shape[:3], np.uint8)
    levels = LEVELS[np.stack([blocks & 15, blocks >> 4], axis=-1)].reshape(*blocks.shape[:3], 32)
    values = levels * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return {"_blocks": blocks, "_scales": scales}, values.reshape(shape)


def write(
    folder: Path, change: Mapping[str, Any] | None = None, raw: Mapping[str, Any] = RAW
) -> dict[str, NDArray[Any]]:
    """A folder in MXFP4; returns the state that it stands for, with single experts."""
    state: dict[str, NDArray[Any]] = dict(checkpoints.tensors(raw))
    stored = {name: value for name, value in checkpoints.fused(raw, state).items() if "proj" not in name.split(".")[-1]
              or name.endswith("_bias")}  # fmt: skip
    rng = np.random.default_rng(1)
    for layer in range(raw["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        for name, outputs, inputs in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            parts, values = four_bits(rng, 3, outputs, inputs)
            stored |= {f"{prefix}.{name}{end}": part for end, part in parts.items()}
            for number, matrix in enumerate(values):
                if name == "down_proj":
                    state[f"{prefix}.{number}.down_proj.weight"] = matrix
                else:
                    state[f"{prefix}.{number}.gate_proj.weight"] = matrix[0::2]
                    state[f"{prefix}.{number}.up_proj.weight"] = matrix[1::2]
    save_file({name: np.ascontiguousarray(value) for name, value in (stored | dict(change or {})).items()},
              folder / "model.safetensors")  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    return state
