"""The arrays that describe pictures to an encoder: made on the host, of shapes that depend on the bucket alone.

N patches of a batch, T tokens of it, M patches of a token, K rows of the table of positions that a patch reads,
P numbers of a patch. The patches of a token follow each other, and tokens are in the order of the text.

A program knows nothing of a picture but these arrays: one that was compiled for a bucket encodes pictures of any
aspect ratio, and several at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

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
    """Patches of pictures, and where each lies."""

    patches: Any  # float32 [N, P]
    rows: Any  # int32 [N]: the patch's row in its picture
    columns: Any  # int32 [N]
    starts: Any  # int32 [N]: the first patch of its picture; 0 in padding
    stops: Any  # int32 [N]: the patch after the last of its picture; 0 in padding
    table_rows: Any  # int32 [N, K]: rows of the table of positions; [N, 0] where all rows have a weight
    weights: Any  # float32 [N, K]: their weights, or all rows' weights


class PositionRows(NamedTuple):
    """The rows of a table of positions that each patch of a picture reads, and their weights."""

    table_rows: NDArray[np.int32]
    weights: NDArray[np.float32]


class PatchNumbers(Protocol):
    """The numbers of a picture's patches [rows · columns, P]: an array, or anything that computes some of its rows."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, patches: NDArray[np.int32], /) -> NDArray[np.float32]:
        """Return the rows of these patches."""
        ...


class ImagePatches(NamedTuple):
    """One picture: its patches in the order of the family's processor, and its size."""

    patches: PatchNumbers
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


class PackedPictures:
    """Pictures one after the other, cut into batches of any size; only then their patches are computed."""

    def __init__(self, images: Sequence[ImagePatches], config: VisionConfig, positions: Any, *, blocks: bool) -> None:
        """`positions(config, grid, rows, columns)` returns the `PositionRows` of a picture.

        With `blocks`, patches come token by token. Raise ValueError for pictures with sides that are not whole tokens.
        """
        self._config, self._images, self._positions = config, images, positions
        self._orders = list[NDArray[np.int32]]()  # of the patches of each picture
        places_of_each = list[tuple[NDArray[np.int32], NDArray[np.int32]]]()
        for image in images:
            grid, shape = image.grid, image.patches.shape
            if min(grid) < 1 or grid.rows % config.merge or grid.columns % config.merge:
                raise ValueError(
                    f"{grid.rows} × {grid.columns} patches are not whole tokens of {config.merge} × {config.merge}"
                )
            if shape != (grid.patches, config.patch_length):
                raise ValueError(f"patches are {list(shape)}, expected {[grid.patches, config.patch_length]}")
            row, column = places(grid, config.merge, blocks=blocks)
            order = members(row, column, grid, config.merge).reshape(-1)
            self._orders.append(order)
            places_of_each.append((row[order], column[order]))
            self._none: PositionRows = positions(config, grid, row[:0], column[:0])  # checks the size of the picture
        lengths = [image.grid.patches for image in images]
        self._firsts = np.cumsum([0, *lengths]).astype(np.int32)
        starts, stops = np.repeat(self._firsts[:-1], lengths), np.repeat(self._firsts[1:], lengths)
        rows, columns = (np.concatenate([place[axis] for place in places_of_each]) for axis in range(2))
        self._others = (rows, columns, starts, stops)

    @property
    def patches(self) -> int:
        """The number of patches of all pictures."""
        return int(self._firsts[-1])

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """Return the first and the last patch + 1 of the pictures that these patches belong to."""
        starts, stops = self._others[2], self._others[3]
        return int(starts[first]), int(stops[stop - 1])

    def cut(self, first: int, size: int) -> PatchBatch:
        """Return a batch of so many patches from one on, with padding after the last.

        Positions are computed here: weights of all rows of a table can be larger than the picture.
        """
        stop = min(first + size, self.patches)
        rows, columns = self._others[:2]
        numbers = np.zeros((size, self._config.patch_length), np.float32)
        table_rows, weights = (_padded(array, size) for array in self._none)
        for image, order, begin, end in zip(
            self._images, self._orders, self._firsts[:-1], self._firsts[1:], strict=True
        ):
            low, high = max(first, begin), min(stop, end)
            if low < high:
                here = slice(low - first, high - first)
                numbers[here] = image.patches[order[low - begin : high - begin]]
                table_rows[here], weights[here] = self._positions(
                    self._config, image.grid, rows[low:high], columns[low:high]
                )
        row, column, start, end = (_padded(array[first:stop], size) for array in self._others)
        return PatchBatch(numbers, row, column, start, end, table_rows, weights)


def _padded(array: NDArray[Any], size: int) -> NDArray[Any]:
    result = np.zeros((size, *array.shape[1:]), array.dtype)
    result[: len(array)] = array
    return result


def patches_of(pixels: NDArray[Any], size: int) -> ImagePatches:
    """Cut a picture [channels, height, width] into patches, row by row; each is its channels, rows and columns."""
    channels, height, width = pixels.shape
    grid = PatchGrid(height // size, width // size)
    cut = pixels.reshape(channels, grid.rows, size, grid.columns, size).transpose(1, 3, 0, 2, 4)
    return ImagePatches(cut.reshape(grid.patches, channels * size * size), grid)


def no_rows(config: VisionConfig, grid: PatchGrid, rows: NDArray[np.int32], columns: NDArray[np.int32]) -> PositionRows:
    """Return no rows: the tower reads its tables at the row and the column of a patch."""
    return PositionRows(np.zeros((len(rows), 0), np.int32), np.zeros((len(rows), 0), np.float32))


def bilinear_rows(
    config: VisionConfig, grid: PatchGrid, rows: NDArray[np.int32], columns: NDArray[np.int32]
) -> PositionRows:
    """Return four rows for each patch: the ones around its place in a square table stretched over the picture."""
    side = config.side
    (upper, row_weight), (left, column_weight) = (
        _around(index, length, side) for index, length in ((rows, grid.rows), (columns, grid.columns))
    )
    table_rows = upper[:, :, None] * side + left[:, None, :]
    weights = row_weight[:, :, None] * column_weight[:, None, :]
    return PositionRows(table_rows.reshape(-1, 4).astype(np.int32), weights.reshape(-1, 4))


def _around(index: NDArray[np.int32], length: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    # In float32 throughout, as transformers computes it.
    source = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(1, length - 1))
    floor = np.floor(source)
    steps = np.arange(2, dtype=np.float32)
    weights = np.maximum(1 - np.abs(source[:, None] - floor[:, None] - steps), 0).astype(np.float32)
    return np.minimum(floor.astype(np.int64)[:, None] + np.arange(2), side - 1), weights


def fixed_rows(
    config: VisionConfig, grid: PatchGrid, rows: NDArray[np.int32], columns: NDArray[np.int32]
) -> PositionRows:
    """Return one row for each patch, for its place. Raise ValueError for a picture of another size."""
    side = config.side
    if grid != (side, side):
        raise ValueError(f"the encoder takes pictures of {side} × {side} patches, not {grid.rows} × {grid.columns}")
    table_rows = (rows * side + columns).astype(np.int32)[:, None]
    return PositionRows(table_rows, np.ones_like(table_rows, np.float32))


def bucketed_rows(
    config: VisionConfig, grid: PatchGrid, rows: NDArray[np.int32], columns: NDArray[np.int32]
) -> PositionRows:
    """Return one row for each patch: the part of a square table that its place in the picture falls into."""
    # transformers compares roundings of these fractions, by another rule on each kind of processor: where a side is no
    # power of two and a picture has another one, a place that is exactly on a bound may come out one lower there.
    row, column = (index * config.side // length for index, length in ((rows, grid.rows), (columns, grid.columns)))
    table_rows = (row * config.side + column).astype(np.int32)[:, None]
    return PositionRows(table_rows, np.ones_like(table_rows, np.float32))


def resized_weights(
    config: VisionConfig, grid: PatchGrid, rows: NDArray[np.int32], columns: NDArray[np.int32]
) -> PositionRows:
    """Return weights of all rows for each patch: of a square table resized to the picture, linearly and antialiased."""
    (down, across) = (
        _resized(index, length, config.side) for index, length in ((rows, grid.rows), (columns, grid.columns))
    )
    weights = (down[:, :, None] * across[:, None, :]).reshape(len(rows), config.side**2)
    return PositionRows(np.zeros((len(rows), 0), np.int32), weights)


def _resized(index: NDArray[np.int32], length: int, side: int) -> NDArray[np.float32]:
    scale = np.float32(side) / np.float32(length)
    centre = (index.astype(np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    distance = np.abs(np.arange(side, dtype=np.float32) - centre[:, None]) / max(np.float32(1), scale)
    weights = np.maximum(np.float32(1) - distance, np.float32(0))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
