"""A GGUF file of a checkpoint that every engine opens as it is: Q4_0, Q8_0, or llama.cpp's mixture Q4_K_M.

The mixture is that of llama.cpp's `llama-quantize`: Q6_K for the embedding and, in half of the layers, for v and the
second matrix of the MLP, Q4_K for the rest; rows that are no multiple of 256 values have Q5_0 and Q8_0 in their place.
Numbers are rounded to the nearest without looking for better scales, as speed does not depend on them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.gguf.blocks import BY_NAME, BlockType, K, quantize
from rekindle._src.models.loading.gguf.export import GgufExport, export, write_gguf
from rekindle._src.models.loading.stored import look
from rekindle._src.models.registry import config_from_hf
from rekindle.models import export as export_model

KINDS = ("q4_0", "q8_0", "q4_k_m")
FILE_TYPE = 15  # that a file says of itself: mostly Q4_K, medium
Floats = NDArray[np.float32]


def write(folder: Path, kind: str, file: Path) -> Path:
    """The file, unless it is there already."""
    if file.exists():
        return file
    if kind != "q4_k_m":
        return export_model(folder, file, type=kind)
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        wide = export_model(folder, Path(scratch) / "wide.gguf", type="bf16")
        mix(wide, Path(scratch) / "mixed.gguf").rename(file)
    return file


def mix(wide: Path, file: Path) -> Path:
    """The mixture of a file of floats."""
    stored = look(wide)
    config = config_from_hf(stored.raw)
    made = export(stored, config, "auto", lambda count: None)
    kinds = [kind_of(tensor.name, tensor.shape, config.num_layers) for tensor in made.tensors]
    tensors = [tensor._replace(kind=kind) for tensor, kind in zip(made.tensors, kinds, strict=True)]
    metadata = made.metadata | {"questions.file_type": FILE_TYPE, "questions.quantization_version": 2}
    write_gguf(file, metadata, tensors, _pieces(made, kinds))
    return file


def kind_of(name: str, shape: tuple[int, ...], layers: int) -> BlockType:
    """The type of a tensor in the mixture."""
    if len(shape) < 2:
        return BY_NAME["F32"]
    layer = re.match(r"blk\.(\d+)\.(attn_v|ffn_down)\.", name)
    finer = _has_more_bits(int(layer[1]), layers) if layer else name in ("token_embd.weight", "output.weight")
    if shape[-1] % K:
        return BY_NAME["Q8_0" if finer else "Q5_0"]
    return BY_NAME["Q6_K" if finer else "Q4_K"]


def _has_more_bits(layer: int, layers: int) -> bool:
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _pieces(made: GgufExport, kinds: list[BlockType]) -> Iterator[NDArray[Any]]:
    for tensor, kind in zip(made.tensors, kinds, strict=True):
        left = tensor.nbytes
        while left > 0:
            piece = next(made.pieces)
            left -= piece.nbytes
            yield piece if kind.name == tensor.kind.name else blocks(kind, piece)


def blocks(kind: BlockType, rows: NDArray[Any]) -> NDArray[Any]:
    """The blocks [rows, blocks of a row] of rows of floats."""
    if kind.name not in _FUNCTIONS:
        return quantize(kind, rows)
    found = np.zeros(rows.size // kind.values, kind.layout)
    _FUNCTIONS[kind.name](rows.astype(np.float32).reshape(-1, kind.values), found)
    return found.reshape(len(rows), -1)


def _divided(values: Floats, steps: Floats) -> Floats:
    return np.rint(np.divide(values, steps, out=np.zeros_like(values), where=steps != 0))


def _step(steps: Floats, levels: int) -> tuple[NDArray[np.float16], Floats]:
    """A scale of 16 bits for so many levels of a block's steps [N, groups], and the steps as numbers of levels."""
    scale = (steps.max(axis=1) / levels).astype(np.float16)
    return scale, _divided(steps, scale.astype(np.float32)[:, None] + np.zeros_like(steps)).clip(0, levels)


def _q5_0(values: Floats, found: NDArray[Any]) -> None:
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
    scale = (largest / -16).astype(np.float16)
    levels = (_divided(values, scale.astype(np.float32) + np.zeros_like(values)) + 16).clip(0, 31).astype(np.uint8)
    found["scale"] = scale[:, 0]
    found["low"] = levels[:, :16] & 15 | (levels[:, 16:] & 15) << 4
    found["high"] = np.packbits(levels >> 4, axis=1, bitorder="little")


def _q4_k(values: Floats, found: NDArray[Any]) -> None:
    groups = values.reshape(-1, 8, 32)
    low = np.minimum(groups.min(axis=2), 0)
    found["scale"], steps = _step((groups.max(axis=2) - low) / 15, 63)
    found["least"], minima = _step(-low, 63)
    step = steps * found["scale"].astype(np.float32)[:, None]
    least = minima * found["least"].astype(np.float32)[:, None]
    shifted = groups + least[:, :, None]
    levels = _divided(shifted, step[:, :, None] + np.zeros_like(shifted)).clip(0, 15).astype(np.uint8)
    found["low"] = (levels[:, 0::2] | levels[:, 1::2] << 4).reshape(-1, 128)
    s, m = steps.astype(np.uint8), minima.astype(np.uint8)
    found["scales"] = np.concatenate(
        [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], axis=1
    )


def _q6_k(values: Floats, found: NDArray[Any]) -> None:
    groups = values.reshape(-1, 16, 16)
    found["scale"], steps = _step(np.abs(groups).max(axis=2) / 31, 127)
    found["scales"] = steps
    step = (steps * found["scale"].astype(np.float32)[:, None])[:, :, None] + np.zeros_like(groups)
    levels = (_divided(groups, step).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    found["low"] = (levels[:, :, :2] & 15 | (levels[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = levels >> 4
    found["high"] = (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(-1, 64)


_FUNCTIONS = {"Q5_0": _q5_0, "Q4_K": _q4_k, "Q6_K": _q6_k}
