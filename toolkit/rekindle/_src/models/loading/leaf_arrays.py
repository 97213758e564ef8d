"""A parameter of a checkpoint on its way into the model: how it is read, and the leaves that it becomes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading import quantize_int4
from rekindle._src.models.loading.four_bits import Integers
from rekindle._src.models.loading.hugepages import aligned
from rekindle._src.models.loading.manifest import Source
from rekindle._src.models.loading.quantize import quantize, quantize_into
from rekindle._src.models.nn.packing import Packing
from rekindle_kernels import int4


class Rounding(NamedTuple):
    """The quantisation of a matrix whose quantised numbers are held as floats."""

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
        quantize_int4.quantize_into(rows, integers, scales)
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
        shape = int4.weight_shape(leaf.shape, leaf.packing.bits)
        packed, ready = aligned(shape, int4.DTYPES[leaf.packing.bits]), np.zeros(shape[:-1], np.bool_)
        return cls(np.empty(leaf.shape, integers), np.empty(groups, leaf.packing.scales), minimum, packed, ready)

    @property
    def nbytes(self) -> int:
        """Bytes of the values, as they are filled."""
        return int(self.values.nbytes)

    def quantize(self, values: NDArray[Any], index: Any) -> None:
        """Quantise rows [out, in] into the place at `index`."""
        assert self.scale is not None, "what is quantised has scales"
        assert self.scale.dtype != int4.STEPPED, "only files have scales with steps"
        if self.scale.ndim < self.values.ndim:  # one for each output
            quantize_into(values, self.values[index], self.scale[index])
            return
        minimum = None if self.minimum is None else self.minimum[index]
        quantize_int4.quantize_into(values, self.values[index], self.scale[index], minimum)

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
            self.packed[rest] = int4.pack(rows.reshape(-1, rows.shape[-1]), leaf.packing.bits)
        arrays = {leaf.path: self.packed, leaf.scale: _adopted(int4.pack_scales(self.scale))}
        if leaf.minimum is not None and self.minimum is not None:
            arrays[leaf.minimum] = _adopted(int4.pack_scales(self.minimum))
        return arrays


def _adopted(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy in memory that the device uses as it is."""
    memory = aligned(array.shape, array.dtype)
    memory[...] = array
    return memory
