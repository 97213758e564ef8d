"""Rows of a checkpoint's tensor as an array, in pieces, for everything made of checkpoints besides a loaded model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.manifest import Source
from rekindle._src.models.loading.tensor_files import TensorEntry, read_into

PIECE = 16 << 20  # bytes of float32 that are in memory at a time


def rows_of(entry: TensorEntry, start: int, stop: int) -> NDArray[Any]:
    """Return the rows [start, stop) of a tensor, as stored or, where they are no plain numbers, in float32."""
    if entry.rows is not None:
        return entry.rows(start, stop)
    values = np.empty((stop - start, *entry.shape[1:]), entry.numpy_dtype)
    read_into(entry, start * (entry.nbytes // max(1, entry.shape[0])), values)
    return values


def pieces_of(entry: TensorEntry, source: Source, multiple: int = 1) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """Yield a tensor's rows in the final form that `source` describes, in pieces: start, stop and values of each.

    Pieces begin at multiples of `multiple` rows. A tensor that has to be transposed comes in one piece.
    """
    count = entry.shape[0]
    if source.transpose:
        yield 0, entry.shape[1], _final(rows_of(entry, 0, count).T, source)
        return
    row = 4 * math.prod(entry.shape[1:])
    step = max(1, PIECE // max(1, row * multiple)) * multiple
    for start in range(0, count, step):
        stop = min(count, start + step)
        yield start, stop, _final(rows_of(entry, start, stop), source)


def _final(values: NDArray[Any], source: Source) -> NDArray[Any]:
    return values.astype(np.float32) + np.float32(source.add) if source.add else values
