"""Conversion of numbers to GGUF blocks, with llama.cpp's rounding: the bytes are those that its own tools write."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.gguf.block_types import Q4_0, Q8_0, BlockType

WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0")


def quantize(kind: BlockType, rows: NDArray[Any]) -> NDArray[Any]:
    """Return the blocks [..., blocks of a row] of rows [..., columns]; columns are a multiple of the type's values."""
    if kind.plain:
        with np.errstate(over="ignore"):  # values too large for 16 bits become infinite
            return np.ascontiguousarray(rows.astype(kind.layout))
    values = rows.astype(np.float32, copy=False).reshape(-1, kind.values)
    blocks = np.empty(len(values), kind.layout)
    with np.errstate(all="ignore"):
        {Q8_0.name: _q8_0, Q4_0.name: _q4_0}[kind.name](values, blocks)
    return blocks.reshape(*rows.shape[:-1], -1)


def _inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def _q8_0(values: NDArray[np.float32], blocks: NDArray[Any]) -> None:
    scale = np.abs(values).max(axis=1) / np.float32(127)
    scaled = values * _inverse(scale)[:, None]
    blocks["scale"] = scale
    blocks["low"] = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))  # halves away from zero


def _q4_0(values: NDArray[np.float32], blocks: NDArray[Any]) -> None:
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)[:, 0]
    scale = largest / np.float32(-8)  # the largest becomes 0 or, if it is positive, 16, which is cut to 15
    levels = np.trunc(values * _inverse(scale)[:, None] + np.float32(8.5)).astype(np.uint8).clip(0, 15)
    blocks["scale"] = scale
    blocks["low"] = levels[:, :16] | (levels[:, 16:] << np.uint8(4))
