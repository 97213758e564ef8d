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
from numpy.typing import NDArray

from rekindle._src.models.loading import quantize_int4
from rekindle._src.models.loading.hugepages import aligned
from rekindle._src.models.loading.load_progress import Meter
from rekindle._src.models.loading.manifest import Part, Source
from rekindle._src.models.loading.quantize import quantize_into
from rekindle._src.models.loading.tensor_files import TensorEntry, read_into
from rekindle._src.models.nn.packing import Packing
from rekindle_kernels import int4

CHUNK = 8 << 20  # bytes of the checkpoint that a worker reads at a time: its scratch memory
WINDOW = 256 << 20  # bytes of leaves between reading and placing: host memory needed beside an accelerator's own
SQUARE = 32  # side of the pieces that a matrix is transposed in
Place = Callable[[str, NDArray[Any]], jax.Array]


def workers() -> int:
    """How many threads read: at most 8, beyond which neither the page cache nor a disk was faster."""
    return max(2, min(8, os.cpu_count() or 2))


def place_on_default_device(path: str, array: NDArray[Any]) -> jax.Array:
    """Puts an array on the default device; on CPU without a copy, so `array` must not be written any more."""
    return jax.device_put(array, may_alias=True)


class LeafPlan(NamedTuple):
    """One parameter to read, and the path of its scale if it is quantised."""

    path: str
    source: Source
    shape: tuple[int, ...]  # of what the checkpoint's tensors make up, which a matrix of four bits is not stored in
    dtype: np.dtype[Any]
    scale: str | None = None
    stored: np.dtype[Any] | None = None  # the leaf's dtype, if the leaf holds the bits of values of another dtype
    packing: Packing | None = None  # of a matrix of four bits
    minimum: str | None = None


class _Arrays(NamedTuple):
    """What workers fill for one parameter. A matrix of four bits is packed once it is there as a whole."""

    values: NDArray[Any]
    scale: NDArray[Any] | None = None
    minimum: NDArray[Any] | None = None

    @classmethod
    def of(cls, leaf: LeafPlan) -> _Arrays:
        if leaf.packing is None:
            scale = None if leaf.scale is None else aligned(leaf.shape[:-1], np.float32)
            return cls(aligned(leaf.shape, leaf.dtype), scale)
        groups = (*leaf.shape[:-1], leaf.shape[-1] // leaf.packing.group)
        scale, minimum = (
            np.empty(groups, leaf.packing.scales) if one else None for one in (True, leaf.packing.minimum)
        )
        return cls(np.empty(leaf.shape, np.uint8), scale, minimum)

    def quantize(self, values: NDArray[Any], index: Any) -> None:
        """Quantise rows [out, in] into the place that `index` says."""
        assert self.scale is not None, "what is quantised has scales"
        if self.values.dtype == np.int8:
            quantize_into(values, self.values[index], self.scale[index])
            return
        minimum = None if self.minimum is None else self.minimum[index]
        quantize_int4.quantize_into(values, self.values[index], self.scale[index], minimum)

    def leaves(self, leaf: LeafPlan) -> dict[str, NDArray[Any]]:
        """The finished leaves by path."""
        if leaf.packing is None:
            found = {leaf.path: self.values if leaf.stored is None else self.values.view(leaf.stored)}
            return found if leaf.scale is None or self.scale is None else found | {leaf.scale: self.scale}
        assert leaf.scale is not None and self.scale is not None, "integers have scales"
        found = {leaf.path: int4.pack(self.values), leaf.scale: int4.pack_scales(self.scale)}
        if leaf.minimum is not None and self.minimum is not None:
            found[leaf.minimum] = int4.pack_scales(self.minimum)
        return {path: _adopted(array) for path, array in found.items()}


class _Piece(NamedTuple):
    """Rows [start, stop) of one part: what one worker reads at a time."""

    part: Part
    entry: TensorEntry
    start: int
    stop: int


def read_leaves(
    leaves: Sequence[LeafPlan], entries: Mapping[str, TensorEntry], *, place: Place, meter: Meter
) -> dict[str, jax.Array]:
    """The leaves by path, on their devices. `checkpoint.plan` has checked every part in `entries`."""
    done: dict[str, jax.Array] = {}
    pending: collections.deque[tuple[LeafPlan, _Arrays, list[Future[None]]]] = collections.deque()
    in_flight = 0
    scratch = threading.local()

    def finish() -> int:
        leaf, arrays, futures = pending.popleft()
        for future in futures:
            future.result()
            meter.tell()
        done.update({path: place(path, array) for path, array in arrays.leaves(leaf).items()})
        return arrays.values.nbytes

    pool = ThreadPoolExecutor(workers(), thread_name_prefix="rekindle-load")
    try:
        for leaf in sorted(leaves, key=lambda leaf: _position(leaf, entries)):
            arrays = _Arrays.of(leaf)
            futures = [
                pool.submit(_read, piece, leaf.source, arrays, scratch, meter) for piece in _pieces(leaf, entries)
            ]
            pending.append((leaf, arrays, futures))
            in_flight += arrays.values.nbytes
            while in_flight > WINDOW:
                in_flight -= finish()
        while pending:
            finish()
    finally:
        pool.shutdown(cancel_futures=True)
    return done


def _position(leaf: LeafPlan, entries: Mapping[str, TensorEntry]) -> tuple[str, int]:
    first = entries[leaf.source.names[0]]
    return str(first.file), first.offset  # reading in the order of the disk is faster


def _pieces(leaf: LeafPlan, entries: Mapping[str, TensorEntry]) -> Iterator[_Piece]:
    for part in leaf.source.parts(leaf.shape):
        entry = entries[part.name]
        rows = part.shape[0] if part.shape else 1
        whole = leaf.source.transpose or leaf.source.tiled or len(part.shape) < 2
        step = rows if whole else max(1, CHUNK // max(1, entry.nbytes // max(1, rows)))
        for start in range(0, rows, step):
            yield _Piece(part, entry, start, min(rows, start + step))


def _read(
    piece: _Piece,
    source: Source,
    arrays: _Arrays,
    scratch: threading.local,
    meter: Meter,
) -> None:
    part, entry = piece.part, piece.entry
    index = part.place
    whole = piece.stop - piece.start == (part.shape[0] if part.shape else 1)
    shape = part.shape if whole else (piece.stop - piece.start, *part.shape[1:])
    row_bytes = entry.nbytes // max(1, part.shape[0] if part.shape else 1)
    target = arrays.values[index]
    if not whole:
        target = target[piece.start : piece.stop]
    direct = (
        arrays.scale is None
        and target.dtype == entry.numpy_dtype
        and target.shape == shape
        and not (source.transpose or source.add)
    )
    if direct and target.flags.c_contiguous:
        read_into(entry, piece.start * row_bytes, target)
        meter.add(target.nbytes)
        return
    values = _borrow(scratch, shape, entry.numpy_dtype)
    read_into(entry, piece.start * row_bytes, values)
    meter.add(values.nbytes)
    if source.transpose:
        values = values.T
    if source.add:
        values = values.astype(np.float32) + np.float32(source.add)
    if arrays.scale is None:
        _copy(values, target)
    else:
        *stack, rows = index
        assert isinstance(rows, slice), "tensors fill rows"
        arrays.quantize(values, (*stack, slice(rows.start + piece.start, rows.start + piece.stop)))


def _adopted(array: NDArray[Any]) -> NDArray[Any]:
    """A copy in memory that the device uses as it is."""
    memory = aligned(array.shape, array.dtype)
    memory[...] = array
    return memory


def _copy(values: NDArray[Any], target: NDArray[Any]) -> None:
    """Copies values, a transposed matrix in squares that fit L1: 2.4 GB/s of float32, where numpy's copy ran at 0.9."""
    if values.ndim != 2 or values.flags.c_contiguous:
        target[...] = values
        return
    for row in range(0, values.shape[0], SQUARE):
        for column in range(0, values.shape[1], SQUARE):
            square = np.s_[row : row + SQUARE, column : column + SQUARE]
            target[square] = values[square]


def _borrow(scratch: threading.local, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Scratch memory of this worker, reused for the next piece: new memory would cost page faults every time."""
    count = math.prod(shape) * dtype.itemsize
    memory: NDArray[np.uint8] | None = getattr(scratch, "memory", None)
    if memory is None or memory.nbytes < count:
        memory = np.empty(max(count, CHUNK), np.uint8)
        if count <= 2 * CHUNK:  # memory for a rare huge row or transposed tensor is not kept
            scratch.memory = memory
    return memory[:count].view(dtype).reshape(shape)
