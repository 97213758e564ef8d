"""The role of a parameter when a model is divided over devices: the part of it on each device.

A manifest gives every parameter one of these. Axes refer to the parameter as it is stored, `[out, in]`:

    REPLICATED              every device has all of it: norms, routers, biases that are added to a sum
    column(spans…)          its rows (outputs) are divided; the product needs nothing from other devices
    row(size)               its columns (inputs) are divided; products are partial and have to be summed
    vocab(size)             its rows are divided; a lookup is summed and logits are put together again
    experts(count, role)    a stack: experts are divided over the axis "expert", each of them over the axis "model"

A fused parameter consists of several spans, and each device gets its part of each: of `[q; k; v]` some heads of q and
the heads of k and v that belong to them. A span that has fewer parts than there are devices is repeated, as heads of k
and v are; one that can't be divided evenly is padded with zeros.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ALL = ("expert", "model")  # every device of the mesh has a different part


class Span(NamedTuple):
    """Rows of a parameter that are divided together; beyond `most` parts, several devices have the same one."""

    size: int
    most: int | None = None

    def local(self, count: int) -> int:
        """Return the size of one of `count` parts."""
        return -(-self.size // self.different(count))

    def different(self, count: int) -> int:
        """Return how many of `count` parts differ."""
        return count if self.most is None else min(count, self.most)

    def range(self, index: int, count: int) -> tuple[int, int]:
        """Return the half-open range of part `index` of `count`; shorter than `local` where the part is padded."""
        different, size = self.different(count), self.local(count)
        start = index * different // count * size
        return min(start, self.size), min(start + size, self.size)


class Division(NamedTuple):
    """One axis of a parameter, the mesh axes that it is divided over, and its spans."""

    axis: int
    over: tuple[str, ...]
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """The division of a parameter; `scale` is the role of its scales, which have no input axis."""

    divisions: tuple[Division, ...] = ()

    @property
    def scale(self) -> Role:
        """The role of the scales of an int8 matrix or of its stack: one for each output."""
        return Role(tuple(division for division in self.divisions if division.axis >= 0))

    def packed(self, stack: bool, outputs: int, inputs: Fraction) -> Role:
        """Return the role of an array of a 4-bit matrix or stack, with a row for each `outputs` outputs and `inputs`
        columns for each input."""

        def scaled(division: Division) -> Division:
            if division.axis == 0 and stack:  # of experts
                return division
            ratio = inputs if division.axis < 0 else Fraction(1, outputs)
            return division._replace(spans=tuple(Span(int(span.size * ratio), span.most) for span in division.spans))

        return Role(tuple(scaled(division) for division in self.divisions))

    def reason_against_packing(self, stack: bool, outputs: int, group: int, sizes: Sizes) -> str | None:
        """Return why parts of a 4-bit matrix are not whole blocks of outputs and groups of inputs; None if they are."""
        for axis, over, spans in self.divisions:
            if axis == 0 and stack:
                continue
            unit, noun = (group, "inputs") if axis < 0 else (outputs, "outputs")
            for span in spans:
                parts = span.different(count_of(over, sizes))
                if span.size % (parts * unit):
                    return f"{span.size} {noun} in {parts} parts are not multiples of {unit}"
        return None


REPLICATED = Role()


def column(*spans: Span) -> Role:
    """Return the role of a parameter with divided outputs."""
    return Role((Division(0, ALL, spans),))


def row(size: int, most: int | None = None) -> Role:
    """Return the role of a parameter with divided inputs."""
    return Role((Division(-1, ALL, (Span(size, most),)),))


def vocab(size: int) -> Role:
    """Return the role of a parameter with divided rows, one for each token of the vocabulary."""
    return Role((Division(0, ALL, (Span(size),)),))


def experts(count: int, role: Role) -> Role:
    """Return the role of a stack of `count` matrices with this role: the experts are divided first."""
    inside = [Division(division.axis + (division.axis >= 0), ("model",), division.spans) for division in role.divisions]
    return Role((Division(0, ("expert",), (Span(count),)), *inside))


def heads(queries: int, kv: int, size: int) -> tuple[Span, Span, Span]:
    """Return the spans of a fused `[q; k; v]` of heads of `size` rows each."""
    keys = Span(kv * size, kv)
    return Span(queries * size, queries), keys, keys


def recurrent_spans(key_heads: int, heads: int, key_size: int, value_size: int) -> tuple[Span, Span, Span]:
    """Return the spans of a recurrent layer's keys, of its values, and of one number for each of its heads."""
    return Span(key_heads * key_size, key_heads), Span(heads * value_size, heads), Span(heads, heads)


Sizes = Mapping[str, int]  # devices by mesh axis


def count_of(over: tuple[str, ...], sizes: Sizes) -> int:
    """Return the number of parts over these mesh axes."""
    return math.prod(sizes[name] for name in over)


def _index_of(over: tuple[str, ...], sizes: Sizes, place: Sizes) -> int:
    index = 0
    for name in over:
        index = index * sizes[name] + place[name]
    return index


def local_shape(role: Role, shape: tuple[int, ...], sizes: Sizes) -> tuple[int, ...]:
    """Return the shape of one device's part."""
    local = list(shape)
    for axis, over, spans in role.divisions:
        local[axis] = sum(span.local(count_of(over, sizes)) for span in spans)
    return tuple(local)


def cut(
    role: Role, array: NDArray[Any], sizes: Sizes, place: Sizes, memory: Callable[..., NDArray[Any]] = np.empty
) -> NDArray[Any]:
    """Return the part of the device at `place`, in memory of its own, allocated by `memory(shape, dtype)`."""
    part: NDArray[Any] = memory(local_shape(role, array.shape, sizes), array.dtype)
    pairs = list(ranges(role, array.ndim, sizes, place))
    if sum(math.prod(_lengths(target, part.shape)) for _, target in pairs) < part.size:
        part[...] = np.zeros((), part.dtype)  # numbers outside of all ranges are padding
    for source, target in pairs:
        part[target] = array[source]
    return part


def join(
    role: Role, parts: Mapping[tuple[int, int], NDArray[Any]], shape: tuple[int, ...], sizes: Sizes
) -> NDArray[Any]:
    """Return the whole parameter from its parts by (expert, model); the inverse of `cut`."""
    first = next(iter(parts.values()))
    whole = np.empty(shape, first.dtype)
    for (expert, model), part in parts.items():
        for source, target in ranges(role, len(shape), sizes, {"expert": expert, "model": model}):
            whole[source] = part[target]
    return whole


Slices = tuple[slice, ...]


def ranges(role: Role, ndim: int, sizes: Sizes, place: Sizes) -> Iterator[tuple[Slices, Slices]]:
    """Yield the slices of each block of a part: in the whole parameter, and in the part."""
    choices = []
    for axis, over, spans in role.divisions:
        count, index = count_of(over, sizes), _index_of(over, sizes, place)
        begin, offset, blocks = 0, 0, []
        for span in spans:
            start, stop = span.range(index, count)
            blocks.append((axis % ndim, slice(begin + start, begin + stop), slice(offset, offset + stop - start)))
            begin, offset = begin + span.size, offset + span.local(count)
        choices.append(blocks)
    for combination in itertools.product(*choices):
        source, target = [slice(None)] * ndim, [slice(None)] * ndim
        for axis, from_, to in combination:
            source[axis], target[axis] = from_, to
        yield tuple(source), tuple(target)


def _lengths(slices: Slices, shape: tuple[int, ...]) -> list[int]:
    return [len(range(*slice_.indices(size))) for slice_, size in zip(slices, shape, strict=True)]


@dataclasses.dataclass(frozen=True, slots=True)
class LeafParts:
    """A leaf in parts that reads as one array."""

    parts: Mapping[tuple[int, int], Any]
    role: Role
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sizes: Mapping[str, int]  # of the mesh, by its axes

    @property
    def on_host(self) -> bool:
        """True if the parts are views into host memory, which they keep alive."""
        return all(isinstance(part, np.ndarray) for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        parts = {place: np.asarray(part) for place, part in self.parts.items()}
        array: NDArray[Any] = join(self.role, parts, self.shape, self.sizes)
        return array if dtype is None else array.astype(dtype)
