"""Reads checkpoint tensors into a model's leaves, in parallel and in pieces, each piece once into its final place."""

from __future__ import annotations

import collections
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from numpy.typing import NDArray

from rekindle._src.models.base import ALONE, Placement
from rekindle._src.models.loading.four_bits import are_grouped, fills, fitted
from rekindle._src.models.loading.leaf_arrays import DividedArrays, LeafArrays, LeafPlan, Share
from rekindle._src.models.loading.load_progress import ByteMeter
from rekindle._src.models.loading.manifest import TensorPart
from rekindle._src.models.loading.tensor_files import TensorEntry, read_into
from rekindle._src.models.placement import MeshPlacement
from rekindle_kernels import int4

CHUNK = 8 << 20  # bytes of the checkpoint that a worker reads at a time: its scratch memory
UNPACKED = 4 << 20  # bytes of values that a worker unpacks at a time, where they are not stored as plain numbers
WINDOW = 256 << 20  # bytes of leaves between reading and placing: host memory needed besides an accelerator's own
SQUARE = 32  # side of the pieces that a matrix is transposed in
Place = Callable[[str, NDArray[Any]], Array]


def workers() -> int:
    """Return the number of reading threads: at most 8, beyond which neither the page cache nor a disk was faster."""
    return max(2, min(8, os.cpu_count() or 2))


def place_on_default_device(path: str, array: NDArray[Any]) -> Array:
    """Put an array on the default device; on CPU without a copy, so `array` must not be written any more."""
    return jax.device_put(array, may_alias=True)


class _Piece(NamedTuple):
    """Rows [start, stop) of one part, which one worker reads at a time."""

    part: TensorPart
    entry: TensorEntry
    start: int
    stop: int
    straight: tuple[Share, int] | None = None  # the only share they belong to, and their offset in its rows


def read_leaves(
    leaves: Sequence[LeafPlan],
    entries: Mapping[str, TensorEntry],
    *,
    place: Place,
    meter: ByteMeter,
    placement: Placement = ALONE,
    check: Callable[[LeafPlan], object] | None = None,
) -> dict[str, Array]:
    """Read the leaves; return them by path, on their devices.

    `checkpoint.planned_reads` has checked every part in `entries`. On a mesh, `placement` replaces `place`, and only
    the parts of this process are read and allocated. `check` is called for each leaf in one of the reading threads; its
    exceptions are raised here before the leaf is placed.
    """
    by_path: dict[str, Array] = {}
    pending: collections.deque[tuple[LeafPlan, LeafArrays | DividedArrays, list[Future[Any]]]] = collections.deque()
    in_flight = 0
    scratch = threading.local()

    def finish() -> int:
        leaf, arrays, futures = pending.popleft()
        for future in futures:
            future.result()
            meter.tell()
        if isinstance(arrays, DividedArrays):
            by_path.update(arrays.leaves())
        else:
            by_path.update({path: place(path, array) for path, array in arrays.leaves(leaf).items()})
        return arrays.nbytes

    pool = ThreadPoolExecutor(workers(), thread_name_prefix="rekindle-load")
    try:
        for leaf in sorted(leaves, key=lambda leaf: _position(leaf, entries)):
            arrays: LeafArrays | DividedArrays
            if isinstance(placement, MeshPlacement):
                arrays = DividedArrays(leaf, placement).allocate()
                pieces = _pieces_of_parts(leaf, arrays, entries)
            else:
                arrays, pieces = LeafArrays.of(leaf), _pieces(leaf, entries)
            futures: list[Future[Any]] = [] if check is None else [pool.submit(check, leaf)]
            futures += [pool.submit(_read, piece, leaf, arrays, scratch, meter) for piece in pieces]
            pending.append((leaf, arrays, futures))
            in_flight += arrays.nbytes
            while in_flight > WINDOW:
                in_flight -= finish()
        while pending:
            finish()
    finally:
        pool.shutdown(cancel_futures=True)
    return by_path


def bytes_to_read(leaves: Sequence[LeafPlan], entries: Mapping[str, TensorEntry], placement: Placement) -> int:
    """Return the bytes of the checkpoint that `read_leaves` reads: on a mesh, those for this process's devices."""
    if not isinstance(placement, MeshPlacement):
        return sum(entry.nbytes for entry in entries.values())
    pieces = (piece for leaf in leaves for piece in _pieces_of_parts(leaf, DividedArrays(leaf, placement), entries))
    return sum(_row_bytes(piece) * (piece.stop - piece.start) for piece in pieces)


def _position(leaf: LeafPlan, entries: Mapping[str, TensorEntry]) -> tuple[str, int]:
    first = entries[leaf.source.names[0]]
    return str(first.file), first.offset  # reading in the order of the disk is faster


def _pieces(leaf: LeafPlan, entries: Mapping[str, TensorEntry]) -> Iterator[_Piece]:
    for part in leaf.source.parts(leaf.shape):
        rows = part.shape[0] if part.shape else 1
        yield from _cut(leaf, part, entries[part.name], 0, rows)


def _cut(leaf: LeafPlan, part: TensorPart, entry: TensorEntry, first: int, last: int) -> Iterator[_Piece]:
    """Yield rows [first, last) of a tensor in pieces; the whole tensor in one where single rows can't be read."""
    rows = part.shape[0] if part.shape else 1
    if _at_once(leaf, part):
        yield _Piece(part, entry, 0, rows)
        return
    size, most = (entry.nbytes, CHUNK) if entry.rows is None else (4 * math.prod(part.shape), UNPACKED)
    step = max(1, most // max(1, size // max(1, rows)))
    if leaf.packing is not None:
        step += -step % int4.OUTPUTS  # whole blocks, which are packed at once
    for start in range(first, last, step):
        yield _Piece(part, entry, start, min(last, start + step))


def _pieces_of_parts(leaf: LeafPlan, arrays: DividedArrays, entries: Mapping[str, TensorEntry]) -> Iterator[_Piece]:
    """Yield pieces for this process's devices: rows of one part go straight to it, others are read once for all."""
    source = leaf.source
    plain = leaf.scale is None and leaf.rounding is None and not (source.transpose or source.tiled or source.add)
    for part in source.parts(leaf.shape):
        entry, begin = entries[part.name], _first_row(part)
        straight = plain and entry.rows is None and entry.numpy_dtype == leaf.dtype
        needed = []
        for share in arrays.shares(part.place):
            first, last = (row - begin for row in share.rows)
            if not (straight and share.whole):
                needed.append((first, last))
                continue
            step = max(1, CHUNK * part.shape[0] // max(1, entry.nbytes))
            for start in range(first, last, step):
                yield _Piece(part, entry, start, min(last, start + step), (share, start - first))
        if needed and _at_once(leaf, part):
            yield from _cut(leaf, part, entry, 0, 0)
        else:
            for first, last in _merged(needed):
                yield from _cut(leaf, part, entry, first, last)


def _at_once(leaf: LeafPlan, part: TensorPart) -> bool:
    """True if a tensor has to be read as a whole."""
    return leaf.source.transpose or leaf.source.tiled or len(part.shape) < 2


def _merged(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the rows of all spans, each row once."""
    reached = 0
    for first, last in sorted(spans):
        if last > reached:
            yield max(first, reached), last
            reached = last


def _row_bytes(piece: _Piece) -> int:
    shape = piece.part.shape
    return piece.entry.nbytes // max(1, shape[0] if shape else 1)


def _read(
    piece: _Piece, leaf: LeafPlan, arrays: LeafArrays | DividedArrays, scratch: threading.local, meter: ByteMeter
) -> None:
    part, entry, source = piece.part, piece.entry, leaf.source
    row_bytes, count = _row_bytes(piece), piece.stop - piece.start
    if piece.straight is not None:
        share, offset = piece.straight
        read_into(entry, piece.start * row_bytes, share.target(offset, offset + count))
        meter.add(row_bytes * count)
        return
    if fills(leaf.packing, entry, source):
        _keep(piece, leaf, arrays, meter)
        return
    whole = count == (part.shape[0] if part.shape else 1)
    shape = part.shape if whole else (count, *part.shape[1:])
    index = part.place if whole else _rows(piece)
    values: NDArray[Any]
    if isinstance(arrays, LeafArrays):
        target = arrays.values[index]
        direct = (
            entry.rows is None
            and arrays.scale is None
            and leaf.rounding is None
            and target.dtype == entry.numpy_dtype
            and target.shape == shape
            and not (source.transpose or source.add)
        )
        if direct and target.flags.c_contiguous:
            read_into(entry, piece.start * row_bytes, target)
            meter.add(target.nbytes)
            return
    if entry.rows is None:
        values = _borrow(scratch, shape, entry.numpy_dtype)
        read_into(entry, piece.start * row_bytes, values)
    else:
        values = entry.rows(piece.start, piece.stop)
    meter.add(row_bytes * count)
    if source.transpose:
        values = values.T
    if source.add:
        values = values.astype(np.float32) + np.float32(source.add)
    if leaf.rounding is not None:
        values = leaf.rounding.of(values)
    if leaf.scale is not None:
        arrays.quantize(values, index)
    elif isinstance(arrays, DividedArrays):
        arrays.put(values, index)
    else:
        _copy(values, target)


def _keep(piece: _Piece, leaf: LeafPlan, arrays: LeafArrays | DividedArrays, meter: ByteMeter) -> None:
    """Put rows that are stored in groups into a matrix in groups as they are."""
    entry = piece.entry
    assert are_grouped(entry.rows), entry.name
    assert entry.rows.packing is not None, entry.name
    assert leaf.packing is not None, leaf.path
    integers = entry.rows.integers(piece.start, piece.stop)
    arrays.fill(fitted(integers, entry.rows.packing, leaf.packing), _rows(piece))
    meter.add(entry.nbytes // entry.shape[0] * (piece.stop - piece.start))


def _rows(piece: _Piece) -> tuple[int | slice, ...]:
    """Return the rows of the parameter that a piece covers."""
    *stack, rows = piece.part.place
    assert isinstance(rows, slice), "tensors fill rows"
    return (*stack, slice(rows.start + piece.start, rows.start + piece.stop))


def _first_row(part: TensorPart) -> int:
    """Return the row of the parameter where a tensor begins."""
    rows = part.place[-1]
    assert isinstance(rows, slice), "tensors fill rows"
    return int(rows.start)


def _copy(values: NDArray[Any], target: NDArray[Any]) -> None:
    """Copy values, a transposed matrix in squares that fit L1: 2.4 GB/s of float32, where numpy's copy ran at 0.9."""
    if values.ndim != 2 or values.flags.c_contiguous:
        target[...] = values
        return
    for row in range(0, values.shape[0], SQUARE):
        for column in range(0, values.shape[1], SQUARE):
            square = np.s_[row : row + SQUARE, column : column + SQUARE]
            target[square] = values[square]


def _borrow(scratch: threading.local, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return scratch memory of this worker, reused for the next piece: new memory would cost page faults every time."""
    count = math.prod(shape) * dtype.itemsize
    memory: NDArray[np.uint8] | None = getattr(scratch, "memory", None)
    if memory is None or memory.nbytes < count:
        memory = np.empty(max(count, CHUNK), np.uint8)
        if count <= 2 * CHUNK:  # memory for a rare huge row or transposed tensor is not kept
            scratch.memory = memory
    return memory[:count].view(dtype).reshape(shape)
