"""Rounds one matrix to four bits so that its products with given rows change least (GPTQ).

Columns are rounded one after another. The columns that follow compensate a column's rounding error, as far as rows have
both: the inverse of `gram`, the sum of x · xᵀ over rows x, holds the amounts. A group's scale is chosen among several
at its first column, by the remaining squared error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.quantize_int4 import rounded, scales_for
from rekindle._src.models.nn.packing import Packing
from rekindle_kernels import int4

DAMPING = 0.01  # share of the mean of gram's diagonal that is added to it: columns that no row has stay as they are
# Candidate scales, as shares of the one that reaches the largest weight. A negative one flips the side that
# reaches further.
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, -8 / 7, -1.0, -0.9)
SHARES_WITH_MINIMUMS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)

Floats = NDArray[np.float32]
Parts = tuple[NDArray[np.uint8], NDArray[Any], NDArray[Any] | None]


def calibrated(matrix: Floats, gram: NDArray[Any], packing: Packing) -> Parts:
    """Return weight, scale and minimum of a matrix [out, in], as `rekindle_kernels.int4` stores them, for rows with
    this gram [in, in]."""
    outputs, inputs = matrix.shape
    group, groups = packing.group, inputs // packing.group
    columns = np.array(matrix.T, np.float32, order="C")  # [in, out]: a column lies in one piece
    factor, importance = _factor(gram)
    integers = np.empty((inputs, outputs), np.uint8)
    scale = np.empty((outputs, groups), packing.scales)
    minimum = np.empty_like(scale) if packing.minimum else None
    errors = np.empty((group, outputs), np.float32)
    for number in range(groups):
        begin, end = number * group, (number + 1) * group
        scales, lowest = chosen_scales(columns[begin:end].T[:, None, :], importance[begin:end], packing)
        scale[:, number] = scales[:, 0]
        if minimum is not None and lowest is not None:
            minimum[:, number] = lowest[:, 0]
        wide = scales[:, 0].astype(np.float32)
        base = -int4.OFFSET * wide if lowest is None else lowest[:, 0].astype(np.float32)
        for column in range(begin, end):
            low = None if lowest is None else lowest
            integer = rounded(columns[column][:, None, None].copy(), scales, low)[:, 0, 0]
            integers[column] = integer
            error = (columns[column] - (wide * integer + base)) / factor[column, column]
            errors[column - begin] = error
            columns[column + 1 : end] -= factor[column, column + 1 : end][:, None] * error
        columns[end:] -= factor[begin:end, end:].T @ errors
    packed = None if minimum is None else int4.pack_scales(minimum)
    return int4.pack(np.ascontiguousarray(integers.T)), int4.pack_scales(scale), packed


def chosen_scales(block: Floats, importance: Floats, packing: Packing) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return scales and minimums [out, 1] of weights [out, 1, group]: the best candidates by squared errors, weighted
    by `importance` [group]."""
    widest, lowest = scales_for(block, packing.scales, packing.minimum)
    best, least = widest, np.full(widest.shape, np.inf, np.float32)
    for share in SHARES_WITH_MINIMUMS if packing.minimum else SHARES:
        candidate = (widest.astype(np.float32) * np.float32(share)).astype(packing.scales)
        integers = rounded(block.copy(), candidate, lowest)
        wide = candidate.astype(np.float32)[..., None]
        base = -int4.OFFSET * wide if lowest is None else lowest.astype(np.float32)[..., None]
        error = np.sum((block - (wide * integers + base)) ** 2 * importance, axis=-1)
        better = error < least
        best, least = np.where(better, candidate, best), np.where(better, error, least)
    return best.astype(packing.scales), lowest


def _factor(gram: NDArray[Any]) -> tuple[Floats, Floats]:
    """Return the upper factor of the inverse of gram, damped, and its diagonal: the importance of each column."""
    damped = np.array(gram, np.float64)
    diagonal = np.einsum("ii->i", damped)
    diagonal += max(DAMPING * float(diagonal.mean()), 1e-12)
    importance = diagonal.astype(np.float32)
    inverse = np.linalg.inv(damped)
    factor = np.linalg.cholesky((inverse + inverse.T) / 2).T
    return np.ascontiguousarray(factor, np.float32), importance / importance.mean()
