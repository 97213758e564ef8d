"""A parameter of a checkpoint on its way into the model: how it is read, and the leaves that it becomes.

Where devices share a model, only the parts of this process's devices are in memory (`DividedArrays`). They are filled
box by box, each with some rows of a tensor. A part that has whole rows of it can be filled straight from the file.
Divided columns, and quantised or converted matrices, come through a worker's scratch memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.four_bits import Integers
from rekindle._src.models.loading.hugepages import adopted, aligned
from rekindle._src.models.loading.manifest import Source
from rekindle._src.models.loading.quantize import quantize, quantize_int4_into, quantize_into
from rekindle._src.models.loading.tensor_files import TensorEntry
from rekindle._src.models.nn.packing import Packing
from rekindle._src.models.roles import Role, Sizes, local_shape, ranges
from rekindle_kernels import int4

if TYPE_CHECKING:
    from rekindle._src.models.placement import MeshPlacement

Box = tuple[tuple[int, int], ...]  # [start, stop) on each axis of a parameter
Index = tuple[int | slice, ...]


class Rounding(NamedTuple):
    """The quantisation of a matrix that holds its quantised numbers as floats."""

    packing: Packing | None  # None: eight bits, with a scale for each output

    def of(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Return the numbers that rows [..., in] stand for once they are quantised."""
        rows = values.reshape(-1, values.shape[-1])
        if self.packing is None:
            eight, scale = quantize(rows)
            return (eight * scale[:, None]).reshape(values.shape)
        assert not self.packing.minimum, "only files have minimums"
        integers = np.empty(rows.shape, np.uint8)
        scales = np.empty((len(rows), rows.shape[1] // self.packing.group), self.packing.scales)
        quantize_int4_into(rows, integers, scales)
        numbers = integers.reshape(*scales.shape, self.packing.group).astype(np.float32)
        numbers -= np.float32(int4.OFFSET)
        numbers *= scales.astype(np.float32)[..., None]
        return numbers.reshape(values.shape)


class LeafPlan(NamedTuple):
    """One parameter to read, and the path of its scale if it is quantised."""

    path: str
    source: Source
    shape: tuple[int, ...]  # that the checkpoint's tensors make up; a leaf of four bits has another
    dtype: np.dtype[Any]
    scale: str | None = None
    stored: np.dtype[Any] | None = None  # the leaf's dtype, if the leaf holds the bits of values of another dtype
    packing: Packing | None = None  # of a matrix in groups
    minimum: str | None = None
    rounding: Rounding | None = None


class Reads(NamedTuple):
    """The leaves and tensors to read from a checkpoint, checked against its headers."""

    leaves: list[LeafPlan]
    entries: dict[str, TensorEntry]  # by the tensor's name


class LeafArrays(NamedTuple):
    """The arrays that workers fill for one parameter.

    In a matrix in groups, rows that make whole blocks of the packed form are packed at once, and others when all of
    them are there. Memory that is never written takes no room.
    """

    values: NDArray[Any]
    scale: NDArray[Any] | None = None
    minimum: NDArray[Any] | None = None
    packed: NDArray[Any] | None = None  # of a matrix in groups: its final form
    ready: NDArray[np.bool_] | None = None  # the blocks [N / 16] or [G, N / 16] of it that are there

    @classmethod
    def of(cls, leaf: LeafPlan) -> LeafArrays:
        if leaf.packing is None:
            scale = None if leaf.scale is None else aligned(leaf.shape[:-1], np.float32)
            return cls(aligned(leaf.shape, leaf.dtype), scale)
        groups: tuple[int, ...] = (*leaf.shape[:-1], leaf.shape[-1] // leaf.packing.group)
        if leaf.packing.scales == int4.STEPPED:
            spans = leaf.shape[-1] // int4.SPAN
            groups = (*leaf.shape[:-1], spans, int4.SPAN // leaf.packing.group + int4.STEP_BYTES)
        minimum = np.empty(groups, leaf.packing.scales) if leaf.packing.minimum else None
        integers = np.uint8 if leaf.packing.bits == 4 else np.int8
        shape = int4.weight_shape(leaf.shape, leaf.packing.bits, codes=leaf.packing.codes)
        packed, ready = aligned(shape, leaf.packing.dtype), np.zeros(shape[:-1], np.bool_)
        return cls(np.empty(leaf.shape, integers), np.empty(groups, leaf.packing.scales), minimum, packed, ready)

    @property
    def nbytes(self) -> int:
        """Bytes of the values, as they are filled."""
        return int(self.values.nbytes)

    def quantize(self, values: NDArray[Any], index: Any) -> None:
        """Quantise rows [out, in] into the place at `index`."""
        assert self.scale is not None, "a quantised matrix has scales"
        assert self.scale.dtype != int4.STEPPED, "only files have scales with steps"
        if self.scale.ndim < self.values.ndim:  # one for each output
            quantize_into(values, self.values[index], self.scale[index])
            return
        minimum = None if self.minimum is None else self.minimum[index]
        quantize_int4_into(values, self.values[index], self.scale[index], minimum)

    def fill(self, found: Integers, index: tuple[int | slice, ...]) -> None:
        """Put rows that are stored in groups into the place at `index`."""
        assert self.scale is not None, "integers have scales"
        self.scale[index] = found.scales
        if self.minimum is not None:
            self.minimum[index] = found.minimums
        *stack, rows = index
        assert isinstance(rows, slice), "tensors fill rows"
        if self.packed is None or self.ready is None or rows.start % int4.OUTPUTS or rows.stop % int4.OUTPUTS:
            self.values[index] = found.integers
            return
        blocks = (*stack, slice(rows.start // int4.OUTPUTS, rows.stop // int4.OUTPUTS))
        integers = found.integers.astype(self.values.dtype, copy=False)
        int4.pack(integers, int4.BITS[self.packed.dtype.name], out=self.packed[blocks])
        self.ready[blocks] = True

    def leaves(self, leaf: LeafPlan) -> dict[str, NDArray[Any]]:
        """Return the finished leaves by path."""
        if leaf.packing is None:
            arrays = {leaf.path: self.values if leaf.stored is None else self.values.view(leaf.stored)}
            return arrays if leaf.scale is None or self.scale is None else arrays | {leaf.scale: self.scale}
        assert leaf.scale is not None, "integers have scales"
        assert self.scale is not None, "integers have scales"
        assert self.packed is not None, "they are packed"
        assert self.ready is not None, "they are packed"
        rest = ~self.ready
        if rest.any():
            rows = self.values.reshape(*rest.shape, int4.OUTPUTS, -1)[rest]
            packed = int4.pack(rows.reshape(-1, rows.shape[-1]), leaf.packing.bits)
            self.packed[rest] = packed.view(self.packed.dtype)
        arrays = {leaf.path: self.packed, leaf.scale: adopted(int4.pack_scales(self.scale))}
        if leaf.minimum is not None and self.minimum is not None:
            arrays[leaf.minimum] = adopted(int4.pack_scales(self.minimum))
        return arrays


class _DevicePart:
    """The part of a parameter that some devices of this process have: its arrays, and the boxes that they hold."""

    def __init__(self, role: Role, leaf: LeafPlan, sizes: Sizes, place: Sizes, devices: Sequence[Any]) -> None:
        self.devices = devices
        self.shape = local_shape(role, leaf.shape, sizes)
        self.boxes = [
            (_box(source, leaf.shape), _box(target, self.shape))
            for source, target in ranges(role, len(leaf.shape), sizes, place)
        ]
        self.arrays: LeafArrays | None = None

    @property
    def padded(self) -> bool:
        return sum(prod(stop - start for start, stop in target) for _, target in self.boxes) < prod(self.shape)

    def allocate(self, leaf: LeafPlan) -> None:
        self.arrays = LeafArrays.of(leaf._replace(shape=self.shape))
        if self.padded:
            for array in self.arrays:
                if array is not None:
                    array[...] = np.zeros((), array.dtype)

    @property
    def made(self) -> LeafArrays:
        assert self.arrays is not None, "allocate it first"
        return self.arrays


class Share(NamedTuple):
    """Rows of a parameter that a part has, and their place in it."""

    part: _DevicePart
    rows: tuple[int, int]  # of the parameter
    whole: bool  # with all their columns
    box: Box  # of the part
    axis: int  # of the rows

    def target(self, start: int, stop: int) -> NDArray[Any]:
        """Return the part's memory for the rows [start, stop) of this share."""
        first = self.box[self.axis][0]
        stack = (slice(*bounds) for bounds in self.box[: self.axis])
        return self.part.made.values[(*stack, slice(first + start, first + stop))]


class DividedArrays:
    """`LeafArrays` of the different parts of a parameter that this process's devices have."""

    def __init__(self, leaf: LeafPlan, places: MeshPlacement) -> None:
        self._leaf, self._places = leaf, places
        # A matrix of four bits is divided before it is packed.
        role = places.roles[leaf.path] if leaf.packing is None else leaf.source.role
        groups = places.different(role, len(leaf.shape))
        self._parts = [_DevicePart(role, leaf, places.sizes, place, devices) for place, devices in groups]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, as they are filled."""
        return sum(prod(part.shape) for part in self._parts) * self._leaf.dtype.itemsize

    def allocate(self) -> DividedArrays:
        for part in self._parts:
            part.allocate(self._leaf)
        return self

    def shares(self, index: Index) -> Iterator[Share]:
        """Yield each part's share of the rows at `index`."""
        box = self._wanted(index)
        row = len(index) - 1
        for part in self._parts:
            for source, target in part.boxes:
                inside = _common(source, box)
                if inside is not None:
                    whole = inside[row + 1 :] == box[row + 1 :] and part.shape[row + 1 :] == self._leaf.shape[row + 1 :]
                    yield Share(part, inside[row], whole, _moved(inside, source, target), row)

    def put(self, values: NDArray[Any], index: Index) -> None:
        """Fill in rows that are in their final form but for their dtype."""
        self._fill("values", values, self._wanted(index), Fraction(1))

    def quantize(self, values: NDArray[Any], index: Index) -> None:
        """Quantise whole rows [out, in], and fill them in."""
        packing, arrays = self._leaf.packing, self._parts[0].made
        integers = np.empty(values.shape, arrays.values.dtype)
        minimums = None
        if packing is None:
            scales = np.empty(values.shape[:-1], np.float32)
            quantize_into(values, integers, scales)
        else:
            scales = np.empty((*values.shape[:-1], values.shape[-1] // packing.group), packing.scales)
            minimums = None if arrays.minimum is None else np.empty_like(scales)
            quantize_int4_into(values, integers, scales, minimums)
        self.fill(Integers(integers, scales, minimums), index)

    def leaves(self) -> dict[str, jax.Array]:
        """Return the finished leaves by path, on their devices."""
        arrays: dict[str, list[tuple[NDArray[Any], Sequence[Any]]]] = {}
        for part in self._parts:
            for path, array in part.made.leaves(self._leaf).items():
                arrays.setdefault(path, []).append((array, part.devices))
            part.arrays = None
        return {path: self._places.joined(path, parts) for path, parts in arrays.items()}

    def fill(self, found: Integers, index: Index) -> None:
        """Fill in integers with their scales and minimums."""
        box, packing = self._wanted(index), self._leaf.packing
        self._fill("values", found.integers, box, Fraction(1))
        columns = Fraction(0) if packing is None else Fraction(1, packing.group)  # of the scales, for each input
        self._fill("scale", found.scales, box, columns)
        if found.minimums is not None:
            self._fill("minimum", found.minimums, box, columns)

    def _fill(self, name: str, values: NDArray[Any], box: Box, columns: Fraction) -> None:
        """Copy the values of `box` into every part that overlaps it.

        `columns` is the number of the array's columns for each of the parameter's; with 0 it has one axis less.
        """
        values = np.broadcast_to(values, tuple(stop - start for start, stop in _scaled(box, columns)))
        for part in self._parts:
            array = getattr(part.made, name)
            for source, target in part.boxes:
                inside = _common(source, box)
                if inside is None:
                    continue
                target_index = _slices(_scaled(_moved(inside, source, target), columns))
                source_index = _slices(_scaled(_moved(inside, box, ((0, 0),) * len(box)), columns))
                array[target_index] = values[source_index]

    def _wanted(self, index: Index) -> Box:
        shape = self._leaf.shape
        rest = (slice(0, size) for size in shape[len(index) :])
        return _box(tuple(slice(item, item + 1) if isinstance(item, int) else item for item in (*index, *rest)), shape)


def _box(slices: Sequence[slice], shape: tuple[int, ...]) -> Box:
    bounds = (span.indices(size) for span, size in zip(slices, shape, strict=True))
    return tuple((start, max(start, stop)) for start, stop, _ in bounds)


def _common(one: Box, other: Box) -> Box | None:
    """Return the box that both contain; None if it is empty."""
    overlap = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return overlap if all(start < stop for start, stop in overlap) else None


def _moved(inside: Box, origin: Box, to: Box) -> Box:
    """Return `inside`, a box within `origin`, moved as far as from `origin` to `to`."""
    return tuple(
        (start - a[0] + b[0], stop - a[0] + b[0]) for (start, stop), a, b in zip(inside, origin, to, strict=True)
    )


def _scaled(box: Box, columns: Fraction) -> Box:
    if not columns:
        return box[:-1]
    return (*box[:-1], (int(box[-1][0] * columns), int(box[-1][1] * columns)))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in box)
