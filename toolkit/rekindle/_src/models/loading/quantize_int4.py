"""Quantisation of float matrices to four bits, round to nearest, on the host, in cache-sized pieces.

Without minimums the largest weight of a group, by magnitude, becomes the integer 0, which stands for -8: 16 levels
reach as far as it does on its side and to 7 eighths on the other, which costs less than 15 levels on both. With
minimums the levels go from the smallest weight of a group to the largest. A scale is rounded to its dtype before
weights are divided by it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle_kernels import int4

_BLOCK_BYTES = 1 << 18  # of float32: stays in L2
_LARGEST = {"float16": np.float32(65504), "float32": np.float32(3e38)}


def quantize_into(
    rows: NDArray[Any], integers: NDArray[np.uint8], scale: NDArray[Any], minimum: NDArray[Any] | None = None
) -> None:
    """Quantise rows [out, in] of any float dtype into integers [out, in], scale and minimum [out, groups].

    `scale * (integers - 8)`, or `scale * integers + minimum`, is within half a scale of `rows`, but for the far end of
    a group without minimums, which is within one.
    """
    groups, width = scale.shape[-1], rows.shape[1]
    step = max(1, _BLOCK_BYTES // max(1, 4 * width))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        block = rows[part].astype(np.float32).reshape(-1, groups, width // groups)
        scales, lowest = scales_for(block, scale.dtype, minimum is not None)
        scale[part] = scales
        if minimum is not None:
            minimum[part] = lowest
        with np.errstate(invalid="ignore"):  # a broken group has any integers, and NaN for a scale
            integers[part] = rounded(block, scales, lowest).reshape(-1, width)


def scales_for(block: NDArray[np.float32], dtype: Any, minimums: bool) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return scales and minimums [..., groups], in `dtype`, for weights [..., groups, inputs]."""
    high, low = block.max(axis=-1), block.min(axis=-1)
    most = _LARGEST[np.dtype(dtype).name]
    # A group with an infinite weight is broken: clipped to what a scale can hold, it would look like a number.
    high = np.where(np.isfinite(high) & np.isfinite(low), high, np.float32(np.nan))
    if minimums:
        lowest = np.clip(low, -most, most).astype(dtype)
        return np.minimum((high - lowest.astype(np.float32)) / int4.HIGHEST, most).astype(dtype), lowest
    largest = np.where(high <= -low, low, high)
    return np.clip(largest / -int4.OFFSET, -most, most).astype(dtype), None


def rounded(block: NDArray[np.float32], scales: NDArray[Any], lowest: NDArray[Any] | None) -> NDArray[np.float32]:
    """Return the nearest integers for weights [..., groups, inputs]; `block` is overwritten by them."""
    wide = scales.astype(np.float32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factor = np.where(np.abs(wide) > np.float32(1e-38), 1 / wide, np.float32(0))
    if lowest is not None:
        block -= lowest.astype(np.float32)[..., None]
    block *= factor
    np.rint(block, out=block)
    if lowest is None:
        block += int4.OFFSET
    return np.clip(block, 0, int4.HIGHEST, out=block)


def quantize(
    matrix: NDArray[Any], group: int, *, minimums: bool = False, scales: str = "float16"
) -> tuple[NDArray[np.uint8], NDArray[Any], NDArray[Any] | None]:
    """Return weight, scale and minimum of a matrix or a stack [experts, out, in], as `rekindle_kernels.int4` has it."""
    *lead, width = matrix.shape
    integers, scale = np.empty(matrix.shape, np.uint8), np.empty((*lead, width // group), scales)
    minimum = np.empty_like(scale) if minimums else None
    flat = None if minimum is None else minimum.reshape(-1, width // group)
    rows = matrix.reshape(-1, width)
    quantize_into(rows, integers.reshape(-1, width), scale.reshape(-1, width // group), flat)
    return int4.pack(integers), int4.pack_scales(scale), None if minimum is None else int4.pack_scales(minimum)
