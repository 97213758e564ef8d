"""Tensors that llama.cpp's converter stores in another form than Hugging Face's folders.

They are those of layers with states, and the matrix that makes keys and values of latent vectors: files have two
stacks in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.family import HeadOrder, Rewritten
from rekindle._src.models.loading.four_bits import Integers
from rekindle._src.models.loading.gguf.blocks import BY_NAME
from rekindle._src.models.loading.gguf.rows import GgufRows, integers_of
from rekindle._src.models.loading.tensor_files import TensorEntry
from rekindle._src.models.nn.packing import Packing

WHOLE, KEYS, VALUES = "attn_kv_b", "attn_k_b", "attn_v_b"  # of latent vectors


@dataclasses.dataclass(frozen=True, slots=True)
class RewrittenRows:
    """Rows as Hugging Face's folders have them, read from a tensor of a file; called as `GgufRows` is."""

    stored: GgufRows
    how: Rewritten

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return the values of the rows [start, stop)."""
        parts = [self.stored(first, last) for first, last in self._runs(start, stop)]
        values = np.concatenate(parts)
        if self.how.columns is not None:
            values = values[:, stored_places(np.arange(values.shape[1]), self.how.columns)]
        return np.log(-values) if self.how.logarithm else values

    @property
    def packing(self) -> Packing | None:
        """The packing that keeps the matrix in groups; None where columns lie in another order."""
        return None if self.how.columns is not None else self.stored.packing

    def integers(self, start: int, stop: int) -> Integers:
        """Return the integers, scales and minimums of the rows [start, stop) of a matrix in groups."""
        blocks = [self.stored.blocks(first, last) for first, last in self._runs(start, stop)]
        return integers_of(self.stored.kind.name, np.concatenate(blocks))

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of the file's rows whose concatenation is [start, stop)."""
        if self.how.rows is None:
            yield start, stop
            return
        places = stored_places(np.arange(start, stop), self.how.rows)
        for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
            yield int(run[0]), int(run[-1]) + 1


@dataclasses.dataclass(frozen=True, slots=True)
class JoinedRows:
    """Matrices of which a folder has one, the rows of one behind those of the other, and of stacks each such matrix."""

    parts: tuple[GgufRows, ...]

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return the values of the rows [start, stop), or of so many matrices of a stack."""
        if len(self.parts[0].shape) == 3:
            return np.concatenate([part(start, stop) for part in self.parts], axis=1)
        return np.concatenate([part(first, last) for part, first, last in self._runs(start, stop)])

    @property
    def packing(self) -> Packing | None:
        """The packing that keeps the matrix in groups; None where the parts have different ones."""
        packings = {part.packing for part in self.parts}
        return packings.pop() if len(packings) == 1 and len({part.kind.name for part in self.parts}) == 1 else None

    def integers(self, start: int, stop: int) -> Integers:
        """Return the integers, scales and minimums of the rows [start, stop) of a matrix in groups."""
        blocks = [part.blocks(first, last) for part, first, last in self._runs(start, stop)]
        return integers_of(self.parts[0].kind.name, np.concatenate(blocks))

    def _runs(self, start: int, stop: int) -> Iterator[tuple[GgufRows, int, int]]:
        begin = 0
        for part in self.parts:
            first, last = max(start - begin, 0), min(stop - begin, part.shape[0])
            if first < last:
                yield part, first, last
            begin += part.shape[0]


def stored_places(places: NDArray[np.int64], order: HeadOrder) -> NDArray[np.int64]:
    """Return where rows or columns of Hugging Face's tensor lie in the file."""
    head, within = np.divmod(places - order.first, order.size)
    group, number = np.divmod(head, order.heads // order.groups)
    stored = order.first + (number * order.groups + group) * order.size + within
    return np.where(places < order.first, places, stored)


def entry_of(name: str, stored: TensorEntry, how: Rewritten) -> TensorEntry:
    """Return the entry of Hugging Face's tensor `name`, which the file has as `stored`."""
    shape = stored.shape
    if how.shape is not None and np.prod(how.shape, dtype=np.int64) == np.prod(shape, dtype=np.int64):
        shape = how.shape
    entry = stored._replace(name=name, shape=shape)
    if how.rows is None and how.columns is None and not how.logarithm and stored.has_numbers:
        return entry
    rows = _rows(stored._replace(shape=shape))
    return entry._replace(rows=rows if how.plain else RewrittenRows(rows, how))


def joined(name: str, parts: Sequence[TensorEntry]) -> TensorEntry | None:
    """Return the entry of a tensor that the file has as several; None if these don't belong together."""
    first, axis = parts[0], len(parts[0].shape) - 2
    if axis not in (0, 1) or any(
        part.shape[:axis] + part.shape[axis + 1 :] != first.shape[:axis] + first.shape[axis + 1 :] for part in parts
    ):
        return None
    shape: list[Any] = list(first.shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    rows = JoinedRows(tuple(map(_rows, parts)))
    return first._replace(name=name, shape=tuple(shape), nbytes=sum(part.nbytes for part in parts), rows=rows)


def _rows(entry: TensorEntry) -> GgufRows:
    return GgufRows(entry.file, entry.name, BY_NAME[entry.dtype], entry.shape, entry.offset)


@dataclasses.dataclass(frozen=True, slots=True)
class LatentHeads:
    """Rows of each head's keys, then of its values, of a matrix for each that is [rank, size] and [size, rank].

    Called with a range of rows, it returns their values.
    """

    keys: GgufRows  # [heads, rank, size of a key]
    values: GgufRows  # [heads, size of a value, rank]

    @property
    def of_head(self) -> int:
        """The rows of a head."""
        return self.keys.shape[2] + self.values.shape[1]

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return the values of the rows [start, stop)."""
        size, parts = self.of_head, []
        for head in range(start // size, -(-stop // size)):
            both = [self.keys(head, head + 1)[0].T, self.values(head, head + 1)[0]]
            parts.append(np.concatenate(both)[max(0, start - head * size) : stop - head * size])
        return np.ascontiguousarray(np.concatenate(parts))


def latent_entry(
    name: str, place: str, stored: Mapping[str, TensorEntry]
) -> tuple[TensorEntry, tuple[str, str]] | None:
    """Return the entry of the matrix `name`, whose place is "blk.0.attn_kv_b.weight", and the names of the stacks.

    None if the file does not have the stacks, or as ones that don't belong together.
    """
    stacks = place.replace(WHOLE, KEYS), place.replace(WHOLE, VALUES)
    keys, values = (stored.get(stack) for stack in stacks)
    if keys is None or values is None or len(keys.shape) != 3 or len(values.shape) != 3:
        return None
    if (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2]):
        return None
    rows = LatentHeads(_rows(keys), _rows(values))
    shape = (keys.shape[0] * rows.of_head, keys.shape[1])
    return keys._replace(name=name, shape=shape, nbytes=keys.nbytes + values.nbytes, rows=rows), stacks
