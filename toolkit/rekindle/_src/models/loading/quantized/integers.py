"""Matrices of integers with a scale for each group of inputs: value = scale * (integer - zero).

Integers are packed into words of 32 bits in the orders of AWQ, GPTQ and compressed-tensors. Scales have 16 bits as a
rule, so that a product with the difference of two small integers is exact in float32.

Each class is called with a range [start, stop) of outputs and returns their values [outputs, inputs].
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.four_bits import Integers, packing_for
from rekindle._src.models.loading.rows_of import rows_of
from rekindle._src.models.loading.tensor_files import TensorEntry
from rekindle._src.models.nn.packing import Packing

# The place in a word of eight integers: AWQ interleaves them.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class Grouped(NamedTuple):
    """Integers [outputs, inputs], and scales and zeros [outputs, groups]."""

    integers: NDArray[np.uint8]
    scales: NDArray[Any]
    zeros: NDArray[np.int16]

    def values(self, groups: NDArray[np.int64]) -> NDArray[np.float32]:
        """The values [outputs, inputs]; `groups` says which group each input belongs to."""
        zeros, scales = self.zeros[:, groups], self.scales.astype(np.float32)[:, groups]
        found: NDArray[np.float32] = (self.integers - zeros).astype(np.float32) * scales
        return found

    def kept(self, group: int, packing: Packing | None) -> Integers:
        """The same as matrices of four bits keep it, whose groups may be parts of these of `group` inputs."""
        assert packing is not None, "integers are asked for where they can be kept"
        scales = np.repeat(self.scales.astype(packing.scales), group // packing.group, axis=1)
        if not packing.minimum:
            return Integers(self.integers, scales)
        zeros = np.repeat(self.zeros.astype(np.float32), group // packing.group, axis=1)
        return Integers(self.integers, scales, -scales * zeros)


def unpacked(words: NDArray[Any], bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.uint8]:
    """The integers [..., n * 32 / bits] of words [..., n], the lowest bits first, or in the given order."""
    places = np.arange(32 // bits) if order is None else np.asarray(order)
    shifts = (places * bits).astype(np.uint32)
    found = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return found.astype(np.uint8).reshape(*words.shape[:-1], -1)


class Held:
    """Whole tensors that pieces of a matrix are cut from: read when the first piece is asked for, and let go after all.

    AWQ and GPTQ store a matrix with its inputs first, so that some of its outputs lie all over the tensor.
    """

    def __init__(self, outputs: int, *entries: TensorEntry) -> None:
        self._outputs, self._entries = outputs, entries
        self._lock = threading.Lock()
        self._arrays: tuple[NDArray[Any], ...] | None = None
        self._served = 0

    def take(self, count: int) -> tuple[NDArray[Any], ...]:
        """The tensors, for a piece of so many outputs."""
        with self._lock:
            if self._arrays is None:
                self._arrays = tuple(rows_of(entry, 0, entry.shape[0]) for entry in self._entries)
            arrays = self._arrays
            self._served += count
            if self._served >= self._outputs:
                self._arrays, self._served = None, 0
        return arrays


class AwqRows:
    """AWQ's "gemm" layout: words [inputs, outputs / 8], zeros [groups, outputs / 8], scales [groups, outputs]."""

    def __init__(self, weight: TensorEntry, zeros: TensorEntry | None, scales: TensorEntry, bits: int) -> None:
        self.outputs, self.inputs = scales.shape[1], weight.shape[0]
        self.group = self.inputs // scales.shape[0]
        self._bits, self._has_zeros, self._scales = bits, zeros is not None, scales.numpy_dtype
        self._held = Held(self.outputs, weight, scales, *([zeros] if zeros is not None else []))

    def grouped(self, start: int, stop: int) -> Grouped:
        """The integers, scales and zeros of the outputs [start, stop)."""
        weight, scales, *zeros = self._held.take(stop - start)
        each = 32 // self._bits
        words = slice(start // each, -(-stop // each))
        cut = slice(start - words.start * each, stop - words.start * each)
        order = AWQ_ORDER if self._bits == 4 else None
        integers = unpacked(weight[:, words], self._bits, order)[:, cut].T
        chosen = scales[:, start:stop].T
        if not zeros:
            return Grouped(integers, chosen, np.full(chosen.shape, 1 << (self._bits - 1), np.int16))
        found = unpacked(zeros[0][:, words], self._bits, order)[:, cut].T.astype(np.int16)
        return Grouped(integers, chosen, found)

    @property
    def packing(self) -> Packing | None:
        """How the matrix can be kept in four bits."""
        dtype = np.float32 if self._has_zeros else self._scales
        return packing_for(self.group, minimum=self._has_zeros, dtype=dtype) if self._bits == 4 else None

    def integers(self, start: int, stop: int) -> Integers:
        """What is stored of the outputs [start, stop)."""
        return self.grouped(start, stop).kept(self.group, self.packing)

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        return self.grouped(start, stop).values(np.arange(self.inputs) // self.group)


class GptqRows:
    """GPTQ: words [inputs * bits / 32, outputs], zeros [groups, outputs * bits / 32], scales [groups, outputs].

    `g_idx` [inputs] says which group each input belongs to. Zeros are stored less one, unless `offset` is 0.
    """

    def __init__(
        self,
        weight: TensorEntry,
        zeros: TensorEntry | None,
        scales: TensorEntry,
        g_idx: TensorEntry | None,
        *,
        bits: int,
        offset: int,
    ) -> None:
        self.outputs, self.inputs = weight.shape[1], weight.shape[0] * 32 // bits
        self.group = self.inputs // scales.shape[0]
        self._bits, self._offset, self._has_zeros, self._groups = bits, offset, zeros is not None, g_idx
        self._scales, self._zeros = scales.numpy_dtype, zeros
        self._held = Held(self.outputs, weight, scales, *(e for e in (zeros, g_idx) if e is not None))

    def _read(self, start: int, stop: int) -> tuple[Grouped, NDArray[np.int64]]:
        weight, scales, *others = self._held.take(stop - start)
        each, highest = 32 // self._bits, (1 << self._bits) - 1
        integers = unpacked(np.ascontiguousarray(weight[:, start:stop].T), self._bits)
        chosen = scales[:, start:stop].T
        if self._has_zeros:
            words = slice(start // each, -(-stop // each))
            cut = slice(start - words.start * each, stop - words.start * each)
            stored = unpacked(np.ascontiguousarray(others[0][:, words]), self._bits)[:, cut].T
            zeros = (stored.astype(np.int16) + self._offset) & highest
        else:
            zeros = np.full(chosen.shape, 1 << (self._bits - 1), np.int16)
        usual = np.arange(self.inputs) // self.group
        groups = usual if self._groups is None else others[-1].astype(np.int64) % len(scales)
        return Grouped(integers, chosen, zeros), groups

    @functools.cached_property
    def packing(self) -> Packing | None:
        """How the matrix can be kept in four bits; None where groups are not consecutive inputs."""
        if self._bits != 4 or not self._in_order():
            return None
        minimum = self._zeros is not None and not self._symmetric(self._zeros)
        return packing_for(self.group, minimum=minimum, dtype=np.float32 if minimum else self._scales)

    def integers(self, start: int, stop: int) -> Integers:
        """What is stored of the outputs [start, stop)."""
        return self._read(start, stop)[0].kept(self.group, self.packing)

    def _symmetric(self, zeros: TensorEntry) -> bool:
        """Whether all zeros are half of the integers' range."""
        return bool((rows_of(zeros, 0, zeros.shape[0]).view(np.uint32) == 0x11111111 * (8 - self._offset)).all())

    def _in_order(self) -> bool:
        if self._groups is None:
            return True
        stored = rows_of(self._groups, 0, self.inputs)
        return bool((stored == np.arange(self.inputs) // self.group).all())

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        found, groups = self._read(start, stop)
        return found.values(groups)


class PackedRows:
    """compressed-tensors' "pack-quantized": words [outputs, inputs * bits / 32] of integers plus half their range.

    Scales are [outputs, groups]; zeros, where there are some, are packed along the outputs.
    """

    def __init__(
        self,
        weight: TensorEntry,
        scales: TensorEntry,
        zeros: TensorEntry | None,
        g_idx: TensorEntry | None,
        *,
        bits: int,
        inputs: int,
    ) -> None:
        self.outputs, self.inputs = weight.shape[0], inputs
        self.group = -(-inputs // (scales.shape[1] if len(scales.shape) > 1 else 1))
        self._weight, self._scales, self._zeros, self._g_idx, self._bits = weight, scales, zeros, g_idx, bits

    def grouped(self, start: int, stop: int) -> Grouped:
        """The integers, scales and zeros of the outputs [start, stop)."""
        integers = unpacked(rows_of(self._weight, start, stop), self._bits)[:, : self.inputs]
        scales = rows_of(self._scales, start, stop).reshape(stop - start, -1)
        half = 1 << (self._bits - 1)
        if self._zeros is None:
            return Grouped(integers, scales, np.full(scales.shape, half, np.int16))
        each = 32 // self._bits
        first = start // each
        words = rows_of(self._zeros, first, -(-stop // each))
        zeros = unpacked(np.ascontiguousarray(words.T), self._bits).T[start - first * each : stop - first * each]
        return Grouped(integers, scales, zeros.astype(np.int16))

    @property
    def packing(self) -> Packing | None:
        """How the matrix can be kept in four bits; None where inputs are in the order of their activations."""
        if self._bits != 4 or self._g_idx is not None or self.inputs % self.group:
            return None
        minimum = self._zeros is not None
        return packing_for(self.group, minimum=minimum, dtype=np.float32 if minimum else self._scales.numpy_dtype)

    def integers(self, start: int, stop: int) -> Integers:
        """What is stored of the outputs [start, stop)."""
        return self.grouped(start, stop).kept(self.group, self.packing)

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        groups = np.arange(self.inputs) // self.group
        if self._g_idx is not None:
            stored = rows_of(self._g_idx, 0, self.inputs).astype(np.int64)
            groups = stored if stored.min(initial=0) >= 0 else groups
        return self.grouped(start, stop).values(groups)
