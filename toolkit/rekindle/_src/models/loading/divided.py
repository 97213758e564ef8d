"""A parameter on its way to the devices that share a model: only their parts of it are in memory.

It is filled box by box, each with some rows of a tensor. A part that has whole rows of it can be filled straight from
the file. Columns that are divided, and what is quantised or converted, come through a worker's scratch memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading import quantize_int4
from rekindle._src.models.loading.four_bits import Integers
from rekindle._src.models.loading.leaf_arrays import LeafArrays, LeafPlan
from rekindle._src.models.loading.quantize import quantize_into
from rekindle._src.models.roles import Role, Sizes, local_shape, ranges

Box = tuple[tuple[int, int], ...]  # [start, stop) on each axis of a parameter
Index = tuple[int | slice, ...]


class Places(Protocol):
    """The members of a `Placement` that this module needs."""

    @property
    def roles(self) -> Mapping[str, Role]: ...
    @property
    def sizes(self) -> Sizes: ...
    def different(self, role: Role, ndim: int) -> list[tuple[Sizes, list[Any]]]: ...
    def joined(self, path: str, parts: Sequence[tuple[NDArray[Any], Sequence[Any]]]) -> jax.Array: ...


class _Part:
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

    part: _Part
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

    def __init__(self, leaf: LeafPlan, places: Places) -> None:
        self._leaf, self._places = leaf, places
        # A matrix of four bits is divided before it is packed.
        role = places.roles[leaf.path] if leaf.packing is None else leaf.source.role
        groups = places.different(role, len(leaf.shape))
        self._parts = [_Part(role, leaf, places.sizes, place, devices) for place, devices in groups]

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
        if packing is None:
            scales = np.empty(values.shape[:-1], np.float32)
            quantize_into(values, integers, scales)
            self._fill_integers(Integers(integers, scales), index)
            return
        groups = (*values.shape[:-1], values.shape[-1] // packing.group)
        scales = np.empty(groups, packing.scales)
        minimums = None if arrays.minimum is None else np.empty(groups, packing.scales)
        quantize_int4.quantize_into(values, integers, scales, minimums)
        self._fill_integers(Integers(integers, scales, minimums), index)

    def fill(self, found: Integers, index: Index) -> None:
        """Fill in rows that are stored in groups."""
        self._fill_integers(found, index)

    def leaves(self) -> dict[str, jax.Array]:
        """Return the finished leaves by path, on their devices."""
        arrays: dict[str, list[tuple[NDArray[Any], Sequence[Any]]]] = {}
        for part in self._parts:
            for path, array in part.made.leaves(self._leaf).items():
                arrays.setdefault(path, []).append((array, part.devices))
            part.arrays = None
        return {path: self._places.joined(path, parts) for path, parts in arrays.items()}

    def _fill_integers(self, found: Integers, index: Index) -> None:
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
