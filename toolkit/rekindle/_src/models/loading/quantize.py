"""Quantisation of float matrices on the host, in cache-sized pieces: to int8, or to four bits in groups of inputs.

The cost of each choice: perplexity of the embedded model on 15,561 held-out tokens (`workshop/bench/quality.py`), and
how often the likeliest token equals float32's on random checkpoints of 30 million parameters, all dense families
(`workshop/bench/families.py`). Random weights are the hardest case, since their logits are nearly flat. With random
experts the share is lower, 73 % for bfloat16 and 35 to 59 % in 8 bits, because a token that is routed to other experts
ends up as another token.

    float32                                   1.5057     100 %
    bfloat16                                  1.5057      91 to 99 %
    "int8", embedding and head kept           1.5059      66 to 91 %
    "int8"                                    1.5062      64 to 90 %
    "int8-weight", embedding and head kept    1.5058      77 to 94 %
    "int8-weight"                             1.5057      72 to 93 %

Four bits are rounded to nearest. Without minimums the largest weight of a group, by magnitude, becomes the integer 0,
which stands for -8: 16 levels reach as far as it does on its side and to 7 eighths on the other, which costs less than
15 levels on both. With minimums the levels go from the smallest weight of a group to the largest. A scale is rounded to
its dtype before weights are divided by it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle_kernels import int4

LEVELS = 127  # symmetric: -128 is not used, so that a weight and its negative round alike
_BLOCK_BYTES = 1 << 18  # of float32: stays in L2; 64 rows of 2048 ran 1.3 times as fast as 1024
_LARGEST = {"float16": np.float32(65504), "float32": np.float32(3e38)}


def quantize_into(rows: NDArray[np.generic], weight: NDArray[np.int8], scale: NDArray[np.float32]) -> None:
    """Quantise rows [out, in] of any float dtype into weight int8 [out, in] and scale float32 [out].

    `weight * scale[:, None]` is within half a scale of `rows`; a row of zeros gets a tiny scale and stays zero.
    """
    step = max(1, _BLOCK_BYTES // max(1, 4 * rows.shape[1]))
    for start in range(0, len(rows), step):
        block = rows[start : start + step].astype(np.float32)
        largest = np.maximum(block.max(axis=1), -block.min(axis=1))
        scales = np.maximum(largest / np.float32(LEVELS), np.float32(1e-30))
        with np.errstate(invalid="ignore"):  # a broken row has any integers, and a scale that is not finite
            block *= (1 / scales)[:, None]
            np.rint(block, out=block)
            weight[start : start + step] = block
        scale[start : start + step] = scales


def quantize(rows: NDArray[np.generic]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise a matrix [out, in] or a stack [experts, out, in]; return it with scales [out] or [experts, out]."""
    weight = np.empty(rows.shape, np.int8)
    scale = np.empty(rows.shape[:-1], np.float32)
    width = rows.shape[-1]
    quantize_into(rows.reshape(-1, width), weight.reshape(-1, width), scale.reshape(-1))
    return weight, scale


def quantize_int4_into(
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
        scales, lowest = int4_scales(block, scale.dtype, minimum is not None)
        scale[part] = scales
        if minimum is not None:
            minimum[part] = lowest
        with np.errstate(invalid="ignore"):  # a broken group has any integers, and NaN for a scale
            integers[part] = int4_rounded(block, scales, lowest).reshape(-1, width)


def int4_scales(block: NDArray[np.float32], dtype: Any, minimums: bool) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return scales and minimums [..., groups], in `dtype`, for weights [..., groups, inputs]."""
    high, low = block.max(axis=-1), block.min(axis=-1)
    most = _LARGEST[np.dtype(dtype).name]
    # A group with an infinite weight is broken: clipped to the range of a scale, it would look like a number.
    high = np.where(np.isfinite(high) & np.isfinite(low), high, np.float32(np.nan))
    if minimums:
        lowest = np.clip(low, -most, most).astype(dtype)
        return np.minimum((high - lowest.astype(np.float32)) / int4.HIGHEST, most).astype(dtype), lowest
    largest = np.where(high <= -low, low, high)
    return np.clip(largest / -int4.OFFSET, -most, most).astype(dtype), None


def int4_rounded(block: NDArray[np.float32], scales: NDArray[Any], lowest: NDArray[Any] | None) -> NDArray[np.float32]:
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


def quantize_int4(
    matrix: NDArray[Any], group: int, *, minimums: bool = False, scales: str = "float16"
) -> tuple[NDArray[np.uint8], NDArray[Any], NDArray[Any] | None]:
    """Return weight, scale and minimum of a matrix or a stack [experts, out, in], as `rekindle_kernels.int4` has it."""
    *lead, width = matrix.shape
    integers, scale = np.empty(matrix.shape, np.uint8), np.empty((*lead, width // group), scales)
    minimum = np.empty_like(scale) if minimums else None
    flat = None if minimum is None else minimum.reshape(-1, width // group)
    rows = matrix.reshape(-1, width)
    quantize_int4_into(rows, integers.reshape(-1, width), scale.reshape(-1, width // group), flat)
    return int4.pack(integers), int4.pack_scales(scale), None if minimum is None else int4.pack_scales(minimum)
