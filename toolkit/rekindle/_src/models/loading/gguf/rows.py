"""Reading rows of a GGUF tensor as numbers, in pieces, so that little memory is needed whatever the tensor's size."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.four_bits import Integers
from rekindle._src.models.loading.gguf import grouped
from rekindle._src.models.loading.gguf.block_types import BlockType
from rekindle._src.models.loading.gguf.dequantize import dequantize
from rekindle._src.models.loading.read_bytes import read_exactly
from rekindle._src.models.nn.packing import Packing

VALUES = 1 << 18  # values that are unpacked at a time: they and intermediate results stay in the cache


@dataclasses.dataclass(frozen=True, slots=True)
class GgufRows:
    """Part of a tensor as a matrix of rows [count, columns]; called with a range of rows, it returns their values.

    With `paired`, the file has heads of so many rows each, rotated pairs side by side; row numbers here are those of
    Hugging Face, where the halves of a pair lie half a head apart.
    """

    file: Path
    name: str
    kind: BlockType
    shape: tuple[int, ...]
    offset: int  # of its first byte within the file
    paired: int = 0

    @property
    def row_bytes(self) -> int:
        return self.kind.layout.itemsize * (self.columns // self.kind.values)

    @property
    def columns(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64))

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return the values of the rows [start, stop)."""
        blocks = self.blocks(start, stop)
        flat = blocks.reshape(-1)
        step = max(1, VALUES // self.kind.values)
        if flat.size <= step:
            return dequantize(self.kind, flat).reshape(stop - start, *self.shape[1:])
        values = np.empty((flat.size, self.kind.values), np.float32)
        for first in range(0, flat.size, step):
            values[first : first + step] = dequantize(self.kind, flat[first : first + step])
        return values.reshape(stop - start, *self.shape[1:])

    @property
    def packing(self) -> Packing | None:
        """The packing that keeps the matrix in groups; None for other types."""
        return grouped.PACKINGS.get(self.kind.name) if len(self.shape) == 2 else None

    def integers(self, start: int, stop: int) -> Integers:
        """Return the integers, scales and minimums of the rows [start, stop) of a matrix in groups."""
        return grouped.integers(self.kind.name, self.blocks(start, stop))

    def blocks(self, start: int, stop: int) -> NDArray[Any]:
        """Return the blocks [rows, blocks of a row] of the rows [start, stop), as they are stored."""
        if not self.paired:
            return self._stored(start, stop)
        rows = stored_rows(np.arange(start, stop), self.paired)
        first, last = int(rows.min()), int(rows.max()) + 1
        return self._stored(first, last)[rows - first]

    def _stored(self, start: int, stop: int) -> NDArray[Any]:
        memory = np.empty((stop - start) * self.row_bytes, np.uint8)
        read_exactly(self.file, self.name, self.offset + start * self.row_bytes, memory)
        return memory.view(self.kind.layout).reshape(stop - start, -1)


def stored_rows(rows: NDArray[np.int64], head: int) -> NDArray[np.int64]:
    """Return where rows of Hugging Face's q or k lie in a file that has pairs side by side; heads have `head` rows."""
    start, within = rows - rows % head, rows % head
    half = head // 2
    return start + within % half * 2 + within // half


def paired_rows(rows: NDArray[np.int64], head: int) -> NDArray[np.int64]:
    """Return which of Hugging Face's rows lies at each place of the file: the inverse of `stored_rows`."""
    start, within = rows - rows % head, rows % head
    return start + within % 2 * (head // 2) + within // 2
