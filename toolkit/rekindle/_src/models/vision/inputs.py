"""The arrays that describe pictures to an encoder: made on the host, of shapes that depend on the bucket alone.

N patches of a bucket, T tokens of it, M patches of a token, K rows of the table of positions that a patch reads,
P numbers of a patch.

A program knows nothing of a picture but these arrays: one that was compiled for a bucket encodes pictures of any
aspect ratio, and several at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.vision.config import VisionConfig


class PatchGrid(NamedTuple):
    """The size of a picture in patches. A frame of a video is a picture of its own."""

    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.rows * self.columns


class PatchBatch(NamedTuple):
    """The patches of the pictures in a bucket, and where each lies."""

    patches: Any  # float32 [N, P]
    rows: Any  # int32 [N]: the patch's row in its picture
    columns: Any  # int32 [N]
    starts: Any  # int32 [N]: the first patch of its picture; 0 in padding
    stops: Any  # int32 [N]: the patch after the last of its picture; 0 in padding
    taps: Any  # int32 [N, K]: rows of the table of positions; [N, 0] where all rows have a weight
    weights: Any  # float32 [N, K]: their weights, or those of all rows
    members: Any  # int32 [T, M]: the patches of each token

    @property
    def tokens(self) -> int:
        """The number of tokens of the bucket, padding included."""
        return int(self.members.shape[0])


class PositionTaps(NamedTuple):
    """The rows of a table of positions that each patch of a picture reads, and their weights."""

    taps: NDArray[np.int32]
    weights: NDArray[np.float32]


class ImagePatches(NamedTuple):
    """One picture: its patches in the order of the family's processor, and its size."""

    patches: NDArray[Any]  # [rows · columns, P]
    grid: PatchGrid


def places(grid: PatchGrid, merge: int, *, blocks: bool) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the row and the column of each patch: row by row, or with `blocks` token by token."""
    row, column = np.divmod(np.arange(grid.patches, dtype=np.int32), np.int32(grid.columns))
    if blocks:
        shape = (grid.rows // merge, merge, grid.columns // merge, merge)
        row, column = (axis.reshape(shape).swapaxes(1, 2).reshape(-1) for axis in (row, column))
    return row, column


def members(rows: NDArray[np.int32], columns: NDArray[np.int32], grid: PatchGrid, merge: int) -> NDArray[np.int32]:
    """Return the patches of each token [T, M]: tokens row by row, and within each its patches row by row."""
    number = np.empty(grid.patches, np.int32)
    number[rows * grid.columns + columns] = np.arange(grid.patches, dtype=np.int32)
    shape = (grid.rows // merge, merge, grid.columns // merge, merge)
    return number.reshape(shape).swapaxes(1, 2).reshape(-1, merge * merge)


def pack(
    images: Sequence[ImagePatches],
    config: VisionConfig,
    positions: Any,
    bucket: int,
    *,
    blocks: bool = False,
) -> PatchBatch:
    """Return the pictures in a bucket of so many patches, one after the other.

    `positions(config, grid, rows, columns)` returns the `PositionTaps` of a picture. Raise ValueError for pictures that
    do not fit into the bucket or whose sides are not whole tokens.
    """
    size, total = config.patches_of_token, sum(image.grid.patches for image in images)
    if bucket % size or not 0 < total <= bucket:
        raise ValueError(f"{total:,} patches do not fit into a bucket of {bucket:,}, in tokens of {size} each")
    parts = []
    for image in images:
        grid, shape = image.grid, image.patches.shape
        if min(grid) < 1 or grid.rows % config.merge or grid.columns % config.merge:
            raise ValueError(
                f"{grid.rows} × {grid.columns} patches are not whole tokens of {config.merge} × {config.merge}"
            )
        if shape != (grid.patches, config.patch_length):
            raise ValueError(f"patches are {list(shape)}, expected {[grid.patches, config.patch_length]}")
        row, column = places(grid, config.merge, blocks=blocks)
        parts.append((row, column, positions(config, grid, row, column), members(row, column, grid, config.merge)))
    first = np.cumsum([0, *(image.grid.patches for image in images)]).astype(np.int32)
    taps = [part[2].taps for part in parts]
    weights = [part[2].weights for part in parts]

    def joined(arrays: Sequence[Any], dtype: Any, length: int = bucket) -> NDArray[Any]:
        result = np.zeros((length, *arrays[0].shape[1:]), dtype)
        np.concatenate(arrays, out=result[: sum(len(array) for array in arrays)], casting="same_kind")
        return result

    lengths = np.diff(first)
    starts, stops = np.repeat(first[:-1], lengths), np.repeat(first[1:], lengths)
    tokens = joined([part[3] + at for part, at in zip(parts, first[:-1], strict=True)], np.int32, bucket // size)
    return PatchBatch(
        patches=joined([image.patches for image in images], np.float32),
        rows=joined([part[0] for part in parts], np.int32),
        columns=joined([part[1] for part in parts], np.int32),
        starts=joined([starts], np.int32),
        stops=joined([stops], np.int32),
        taps=joined(taps, np.int32),
        weights=joined(weights, np.float32),
        members=tokens,
    )


def patches_of(pixels: NDArray[Any], size: int) -> ImagePatches:
    """Cut a picture [channels, height, width] into patches, row by row; each is its channels, rows and columns."""
    channels, height, width = pixels.shape
    grid = PatchGrid(height // size, width // size)
    cut = pixels.reshape(channels, grid.rows, size, grid.columns, size).transpose(1, 3, 0, 2, 4)
    return ImagePatches(cut.reshape(grid.patches, channels * size * size), grid)


def no_taps(config: VisionConfig, grid: PatchGrid, rows: NDArray[np.int32], columns: NDArray[np.int32]) -> PositionTaps:
    """Return no rows: the tower reads its tables at the row and the column of a patch."""
    return PositionTaps(np.zeros((len(rows), 0), np.int32), np.zeros((len(rows), 0), np.float32))


def bilinear_taps(
    config: VisionConfig, grid: PatchGrid, rows: NDArray[np.int32], columns: NDArray[np.int32]
) -> PositionTaps:
    """Return four rows for each patch: those around its place in a square table, whose corners are the picture's."""
    side = config.side
    (upper, row_weight), (left, column_weight) = (
        _around(index, length, side) for index, length in ((rows, grid.rows), (columns, grid.columns))
    )
    taps = upper[:, :, None] * side + left[:, None, :]
    weights = row_weight[:, :, None] * column_weight[:, None, :]
    return PositionTaps(taps.reshape(-1, 4).astype(np.int32), weights.reshape(-1, 4))


def _around(index: NDArray[np.int32], length: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    # In float32 throughout, as transformers computes it.
    source = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(1, length - 1))
    floor = np.floor(source)
    steps = np.arange(2, dtype=np.float32)
    weights = np.maximum(1 - np.abs(source[:, None] - floor[:, None] - steps), 0).astype(np.float32)
    return np.minimum(floor.astype(np.int64)[:, None] + np.arange(2), side - 1), weights


def fixed_taps(
    config: VisionConfig, grid: PatchGrid, rows: NDArray[np.int32], columns: NDArray[np.int32]
) -> PositionTaps:
    """Return one row for each patch: that of its place. Raise ValueError for a picture of another size."""
    side = config.side
    if grid != (side, side):
        raise ValueError(f"the encoder takes pictures of {side} × {side} patches, not {grid.rows} × {grid.columns}")
    taps = (rows * side + columns).astype(np.int32)[:, None]
    return PositionTaps(taps, np.ones_like(taps, np.float32))


def bucketed_taps(
    config: VisionConfig, grid: PatchGrid, rows: NDArray[np.int32], columns: NDArray[np.int32]
) -> PositionTaps:
    """Return one row for each patch: that of the part of a square table that its place in the picture falls into."""
    # transformers compares roundings of these fractions, by another rule on each kind of processor: where a side is no
    # power of two and a picture has another one, a place that is exactly on a bound may come out one lower there.
    row, column = (index * config.side // length for index, length in ((rows, grid.rows), (columns, grid.columns)))
    taps = (row * config.side + column).astype(np.int32)[:, None]
    return PositionTaps(taps, np.ones_like(taps, np.float32))


def resized_weights(
    config: VisionConfig, grid: PatchGrid, rows: NDArray[np.int32], columns: NDArray[np.int32]
) -> PositionTaps:
    """Return weights of all rows for each patch: of a square table resized to the picture, linearly and antialiased."""
    (down, across) = (
        _resized(index, length, config.side) for index, length in ((rows, grid.rows), (columns, grid.columns))
    )
    weights = (down[:, :, None] * across[:, None, :]).reshape(len(rows), -1)
    return PositionTaps(np.zeros((len(rows), 0), np.int32), weights)


def _resized(index: NDArray[np.int32], length: int, side: int) -> NDArray[np.float32]:
    scale = np.float32(side) / np.float32(length)
    centre = (index.astype(np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    distance = np.abs(np.arange(side, dtype=np.float32) - centre[:, None]) / max(np.float32(1), scale)
    weights = np.maximum(np.float32(1) - distance, np.float32(0))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
