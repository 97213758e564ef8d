"""Float matrices to int8 with one scale per output channel, on the host and in cache-sized pieces."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEVELS = 127  # symmetric: -128 is not used, so that a weight and its negative round alike
_BLOCK_BYTES = 1 << 18  # of float32: stays in L2; 64 rows of 2048 ran 1.3 times as fast as 1024


def quantize_into(rows: NDArray[np.generic], weight: NDArray[np.int8], scale: NDArray[np.float32]) -> None:
    """rows [out, in] of any float dtype → weight int8 [out, in] and scale float32 [out].

    `weight * scale[:, None]` is within half a scale of `rows`; a row of zeros gets a tiny scale and stays zero.
    """
    step = max(1, _BLOCK_BYTES // max(1, 4 * rows.shape[1]))
    for start in range(0, len(rows), step):
        block = rows[start : start + step].astype(np.float32)
        largest = np.maximum(block.max(axis=1), -block.min(axis=1))
        scales = np.maximum(largest / np.float32(LEVELS), np.float32(1e-30))
        block *= (1 / scales)[:, None]
        np.rint(block, out=block)
        weight[start : start + step] = block
        scale[start : start + step] = scales


def quantize(rows: NDArray[np.generic]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """A matrix [out, in], or a stack of them [experts, out, in], with its scales [out] or [experts, out]."""
    weight = np.empty(rows.shape, np.int8)
    scale = np.empty(rows.shape[:-1], np.float32)
    width = rows.shape[-1]
    quantize_into(rows.reshape(-1, width), weight.reshape(-1, width), scale.reshape(-1))
    return weight, scale
