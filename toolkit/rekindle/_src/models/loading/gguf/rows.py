"""Rows of a GGUF tensor as numbers, in pieces, so that little memory is needed whatever the tensor's size.

Types of integers in groups of 16 and more can be kept exactly in four, six or eight bits. These stand for the numbers
that `dequantize` returns: indices of a table become indices of a codebook, and scales that a type computes in float32
as a product are kept as its factors, or as float32 where no 16 bits hold the factors.

llama.cpp's converter stores some tensors in another form than Hugging Face's folders: tensors of layers with states,
and the matrix that makes keys and values of latent vectors, which files replace by two stacks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.four_bits import Integers
from rekindle._src.models.loading.gguf.blocks import (
    BY_NAME,
    SCALED,
    BlockType,
    dequantize,
    iq4_xs_levels,
    q2_k,
    q3_k,
    q3_k_scales,
    q4,
    q4_k,
    q5,
    q5_k,
    q6_k,
    six_bit_scales,
)
from rekindle._src.models.loading.gguf.rewrites import HeadOrder, TensorRewrite
from rekindle._src.models.loading.tensor_files import TensorEntry, read_exactly
from rekindle._src.models.nn.packing import Packing
from rekindle.errors import CheckpointError
from rekindle_kernels import int4

PIECE = 1 << 18  # values that are unpacked at a time: they and intermediate results stay in the cache
PACKINGS = {
    "Q1_0": Packing(128),
    "Q2_0": Packing(64),
    "TQ1_0": Packing(128),
    "TQ2_0": Packing(128),
    "Q2_K": Packing(16, minimum=True, scales=int4.STEPPED),
    "Q3_K": Packing(16, scales=int4.STEPPED),
    "Q4_0": Packing(32),
    "Q4_1": Packing(32, minimum=True),
    "Q4_K": Packing(32, minimum=True, scales=int4.STEPPED),
    "Q5_0": Packing(32, bits=6),
    "Q5_1": Packing(32, minimum=True, bits=6),
    "Q5_K": Packing(32, minimum=True, scales=int4.STEPPED, bits=6),
    "Q6_K": Packing(16, scales=int4.STEPPED, bits=6),
    "Q8_0": Packing(32, bits=8),
    "IQ1_S": Packing(32, scales="float32", codes=True),
    "IQ1_M": Packing(16, scales="float32", codes=True),
    "IQ2_XXS": Packing(32, scales="float32", codes=True),
    "IQ2_XS": Packing(16, scales="float32", codes=True),
    "IQ2_S": Packing(16, scales="float32", codes=True),
    "IQ3_XXS": Packing(32, scales="float32", bits=6),
    "IQ3_S": Packing(32, minimum=True, scales="float32"),
    "IQ4_NL": Packing(32, codes=True),
    "IQ4_XS": Packing(32, scales=int4.STEPPED, codes=True),
    "MXFP4": Packing(32, scales=int4.EXPONENTS, codes=True),
    "NVFP4": Packing(16, scales="float32", bits=6),
}
Found = tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]  # integers of 8 bits or indices, scales, minimums


@dataclasses.dataclass(frozen=True, slots=True)
class GgufRows:
    """Part of a tensor as a matrix of rows [count, columns]; called with a range of rows, it returns their values.

    With `paired`, the file has heads of so many rows each, rotated pairs side by side; row numbers here are those of
    Hugging Face, where the halves of a pair lie half a head apart. `factors` are one for the tensor, or for each row of
    a stack: the file has them as a tensor of its own.
    """

    file: Path
    name: str
    kind: BlockType
    shape: tuple[int, ...]
    offset: int  # of its first byte within the file
    paired: int = 0
    factors: tuple[float, ...] = ()

    @property
    def row_bytes(self) -> int:
        return self.kind.layout.itemsize * (self.columns // self.kind.values)

    @property
    def columns(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64))

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        blocks = self.blocks(start, stop)
        flat = blocks.reshape(-1)
        step = max(1, PIECE // self.kind.values)
        factors = self._factors(start, stop, flat.size)
        if flat.size <= step:
            return dequantize(self.kind, flat, factors).reshape(stop - start, *self.shape[1:])
        values = np.empty((flat.size, self.kind.values), np.float32)
        for first in range(0, flat.size, step):
            piece = slice(first, first + step)
            values[piece] = dequantize(self.kind, flat[piece], None if factors is None else factors[piece])
        return values.reshape(stop - start, *self.shape[1:])

    @property
    def packing(self) -> Packing | None:
        return PACKINGS.get(self.kind.name) if len(self.shape) == 2 else None

    def integers(self, start: int, stop: int) -> Integers:
        found = integers_of(self.kind.name, self.blocks(start, stop))
        factors = self._factors(start, stop, stop - start)
        return found if factors is None else found._replace(scales=found.scales * factors[:, None])

    def _factors(self, start: int, stop: int, count: int) -> NDArray[np.float32] | None:
        """Return the factors of `count` equal parts of the rows [start, stop); None if there are none."""
        if not self.factors:
            return None
        own = self.factors[start:stop] if len(self.factors) > 1 else self.factors * (stop - start)
        return np.repeat(np.array(own, np.float32), count // (stop - start))

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


def integers_of(kind: str, blocks: NDArray[Any]) -> Integers:
    """Return the integers of rows of blocks [rows, blocks of a row], for a type that PACKINGS has."""
    with np.errstate(all="ignore"):  # scales may be infinite or NaN; the numbers then are, too
        levels, scales, minimums = _INTEGERS[kind](blocks.reshape(-1))
    rows, dtype = len(blocks), np.uint8 if PACKINGS[kind].bits == 4 else np.int8
    shape = (rows, -1, *scales.shape[2:])
    return Integers(
        levels.reshape(rows, -1).view(dtype),
        scales.reshape(shape),
        None if minimums is None else minimums.reshape(shape),
    )


def _one_group(levels: Callable[[Any], NDArray[Any]], *, minimums: bool = False) -> Callable[[Any], Found]:
    """Return a function for blocks of one group each, with a scale of 16 bits, that returns integers and scales."""
    return lambda blocks: (levels(blocks), blocks["scale"], blocks["least"] if minimums else None)


def _of_levels(kind: str) -> Callable[[Any], Found]:
    """Return such a function for a type in SCALED; its groups may be cut into smaller ones."""
    packing, levels_of = PACKINGS[kind], SCALED[kind]

    def found(blocks: Any) -> Found:
        levels, scales = levels_of(blocks)
        groups = levels.shape[1] // packing.group // scales.shape[1]
        scales = np.repeat(scales, groups, axis=1).astype(packing.scales)
        if packing.codes:
            return _places(packing.scales)[levels.view(np.uint8)], scales, None
        return levels + np.int8(int4.OFFSET if packing.bits == 4 else 0), scales, None

    return found


@functools.cache
def _places(scales: str) -> NDArray[np.uint8]:
    """Return where a codebook has the level that is the bits of a byte."""
    places = np.zeros(256, np.uint8)
    for place, level in reversed(list(enumerate(int4.CODEBOOKS[scales]))):
        places[level & 255] = place
    return places


def _odd_levels(blocks: Any) -> Found:
    """Return the halves, rounded down, of IQ3_S's levels: they are 1, 3 and so on to 15, positive and negative."""
    levels, scales = SCALED["IQ3_S"](blocks)
    return (levels + np.int8(15)) >> np.int8(1), scales * np.float32(2), scales * np.float32(-15)


def _with_k_scales(levels: Callable[[Any], NDArray[Any]]) -> Callable[[Any], Found]:
    """Return such a function for blocks of eight groups, with scales and minimums of six bits."""

    def found(blocks: Any) -> Found:
        scales, minimums = six_bit_scales(blocks["scales"])
        return levels(blocks), _stepped(scales, blocks["scale"]), _stepped(minimums, -blocks["least"])

    return found


def _stepped(scales: NDArray[Any], steps: NDArray[Any]) -> NDArray[np.int8]:
    """Return small integers [N, groups] of N blocks with their steps [N], one for each block: [N, 1, groups + 2]."""
    return int4.stepped(scales.view(np.int8), steps[:, None])


_INTEGERS: dict[str, Callable[[Any], Found]] = {
    **{kind: _of_levels(kind) for kind in SCALED},
    "IQ3_S": _odd_levels,
    "Q2_K": lambda blocks: (
        q2_k(blocks),
        _stepped(blocks["scales"] & np.uint8(15), blocks["scale"]),
        _stepped(blocks["scales"] >> np.uint8(4), -blocks["least"]),
    ),
    "Q3_K": lambda blocks: (q3_k(blocks) + np.int8(int4.OFFSET), _stepped(q3_k_scales(blocks), blocks["scale"]), None),
    "Q4_0": _one_group(q4),
    "Q4_1": _one_group(q4, minimums=True),
    "Q4_K": _with_k_scales(q4_k),
    "Q5_0": _one_group(lambda blocks: q5(blocks).view(np.int8) - np.int8(16)),
    "Q5_1": _one_group(q5, minimums=True),
    "Q5_K": _with_k_scales(q5_k),
    "Q6_K": lambda blocks: (q6_k(blocks), _stepped(blocks["scales"], blocks["scale"]), None),
    "Q8_0": _one_group(lambda blocks: np.ascontiguousarray(blocks["low"])),
    "IQ4_NL": _one_group(q4),
    "IQ4_XS": lambda blocks: (q4(blocks), _stepped(iq4_xs_levels(blocks), blocks["scale"]), None),
    "MXFP4": lambda blocks: (q4(blocks), blocks["scale"].view(int4.EXPONENTS), None),
}


WHOLE, KEYS, VALUES = "attn_kv_b", "attn_k_b", "attn_v_b"  # of latent vectors


class _Runs:
    """Rows as Hugging Face's folders have them, joined from runs of the file's; called as `GgufRows` is."""

    __slots__ = ()

    def runs(self, start: int, stop: int) -> Iterator[tuple[GgufRows, int, int]]:
        """Yield tensors of the file with ranges of their rows; together the ranges make up [start, stop)."""
        raise NotImplementedError

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        return np.concatenate([part(first, last) for part, first, last in self.runs(start, stop)])

    def integers(self, start: int, stop: int) -> Integers:
        found = [part.integers(first, last) for part, first, last in self.runs(start, stop)]
        integers, scales, minimums = zip(*found, strict=True)
        least = None if minimums[0] is None else np.concatenate(minimums)
        return Integers(np.concatenate(integers), np.concatenate(scales), least)


@dataclasses.dataclass(frozen=True, slots=True)
class RewrittenRows(_Runs):
    """Rows of a tensor of a file that has them in another order, or as logarithms."""

    stored: GgufRows
    how: TensorRewrite

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        values = _Runs.__call__(self, start, stop)
        if self.how.columns is not None:
            values = values[:, stored_places(np.arange(values.shape[1]), self.how.columns)]
        if not self.how.logarithm:
            return values
        return np.log(-values if self.how.negative else values)

    @property
    def packing(self) -> Packing | None:
        """The packing that keeps the matrix in groups; None where columns lie in another order."""
        return None if self.how.columns is not None else self.stored.packing

    def runs(self, start: int, stop: int) -> Iterator[tuple[GgufRows, int, int]]:
        if self.how.rows is None:
            yield self.stored, start, stop
            return
        places = stored_places(np.arange(start, stop), self.how.rows)
        for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
            yield self.stored, int(run[0]), int(run[-1]) + 1


@dataclasses.dataclass(frozen=True, slots=True)
class JoinedRows(_Runs):
    """Matrices that a folder stores as one, their rows one after the other; in stacks, each matrix is joined so."""

    parts: tuple[GgufRows, ...]

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        if len(self.parts[0].shape) == 3:
            return np.concatenate([part(start, stop) for part in self.parts], axis=1)
        return _Runs.__call__(self, start, stop)

    @property
    def packing(self) -> Packing | None:
        """The packing that keeps the matrix in groups; None where the parts have different ones."""
        packings = {part.packing for part in self.parts}
        return packings.pop() if len(packings) == 1 and len({part.kind.name for part in self.parts}) == 1 else None

    def runs(self, start: int, stop: int) -> Iterator[tuple[GgufRows, int, int]]:
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


def entry_of(name: str, stored: TensorEntry, how: TensorRewrite) -> TensorEntry:
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
    return rows_of(entry, entry.name, factors=factors_of(entry))


def rows_of(entry: TensorEntry, name: str, paired: int = 0, factors: tuple[float, ...] = ()) -> GgufRows:
    """Return the rows of a tensor of the file, which has it as `name`. Raise `CheckpointError` for parts of blocks.

    A vector is rows of one value each, so it can't be stored in blocks.
    """
    kind = BY_NAME[entry.dtype]
    rows = GgufRows(entry.file, name, kind, entry.shape, entry.offset, paired, factors)
    if rows.columns % kind.values:
        raise CheckpointError(
            f"{entry.file}: {name} of shape {[*entry.shape]} is stored as {kind.name}, and its rows are not made "
            f"of blocks of {kind.values} values. Convert the model again."
        )
    return rows


def factors_of(entry: TensorEntry) -> tuple[float, ...]:
    """Return the factors that `with_factors` has given to an entry."""
    return entry.rows.factors if isinstance(entry.rows, GgufRows) else ()


def with_factors(stored: Mapping[str, TensorEntry], kept: Collection[str]) -> dict[str, TensorEntry]:
    """Return the tensors of a file with the factors of NVFP4 ones attached, instead of as separate tensors.

    The factors of "blk.0.ffn_up.weight" are "blk.0.ffn_up.scale": one, or one for each expert of a stack. Factors named
    in `kept` stay, because they are weights of the model.
    """
    found, read = dict(stored), set[str]()
    for name, entry in stored.items():
        factor = name.removesuffix("weight") + "scale"
        if entry.dtype != "NVFP4" or factor not in stored or factor in kept:
            continue
        numbers = stored[factor]
        count = entry.shape[0] if len(entry.shape) == 3 else 1
        if numbers.dtype != "F32" or numbers.shape not in ((1,), (count,)):
            raise CheckpointError(
                f"{numbers.file}: {factor} is {numbers.dtype} {list(numbers.shape)}, not the F32 [{count}] that {name} "
                "needs. Convert the model anew."
            )
        memory = np.empty(numbers.nbytes, np.uint8)
        read_exactly(numbers.file, factor, numbers.offset, memory)
        found[name] = entry._replace(rows=dataclasses.replace(_rows(entry), factors=tuple(memory.view("<f4").tolist())))
        read.add(factor)
    return {name: entry for name, entry in found.items() if name not in read}


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
        size, parts = self.of_head, []
        for head in range(start // size, -(-stop // size)):
            both = [self.keys(head, head + 1)[0].T, self.values(head, head + 1)[0]]
            parts.append(np.concatenate(both)[max(0, start - head * size) : stop - head * size])
        return np.ascontiguousarray(np.concatenate(parts))


def latent_entry(
    name: str, place: str, stored: Mapping[str, TensorEntry]
) -> tuple[TensorEntry, tuple[str, str]] | None:
    """Return the entry of the matrix `name`, with the place "blk.0.attn_kv_b.weight", and the names of its stacks.

    None if the file does not have the stacks, or has stacks that don't belong together.
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
