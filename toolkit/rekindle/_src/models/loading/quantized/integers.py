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
        """Return the values [outputs, inputs]; `groups` has the group of each input."""
        zeros, scales = self.zeros[:, groups], self.scales.astype(np.float32)[:, groups]
        values: NDArray[np.float32] = (self.integers - zeros).astype(np.float32) * scales
        return values

    def kept(self, group: int, packing: Packing | None) -> Integers:
        """Return the integers as matrices of four bits keep them: groups may be parts of these of `group` inputs."""
        assert packing is not None, "integers are asked for where they can be kept"
        scales = np.repeat(self.scales.astype(packing.scales), group // packing.group, axis=1)
        if not packing.minimum:
            return Integers(self.integers, scales)
        zeros = np.repeat(self.zeros.astype(np.float32), group // packing.group, axis=1)
        return Integers(self.integers, scales, -scales * zeros)


def unpacked(words: NDArray[Any], bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.uint8]:
    """Return the integers [..., n * 32 / bits] of words [..., n], the lowest bits first, or in `order`."""
    places = np.arange(32 // bits) if order is None else np.asarray(order)
    shifts = (places * bits).astype(np.uint32)
    integers = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return integers.astype(np.uint8).reshape(*words.shape[:-1], -1)


class Held:
    """Whole tensors that pieces of a matrix are cut from: read for the first piece, and released after the last.

    AWQ and GPTQ store a matrix with its inputs first, so that some of its outputs lie all over the tensor.
    """

    def __init__(self, outputs: int, *entries: TensorEntry) -> None:
        self._outputs, self._entries = outputs, entries
        self._lock = threading.Lock()
        self._arrays: tuple[NDArray[Any], ...] | None = None
        self._served = 0

    def take(self, count: int) -> tuple[NDArray[Any], ...]:
        """Return the tensors, for a piece of `count` outputs."""
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
        """Return the integers, scales and zeros of the outputs [start, stop)."""
        weight, scales, *zeros = self._held.take(stop - start)
        per_word = 32 // self._bits
        words = slice(start // per_word, -(-stop // per_word))
        cut = slice(start - words.start * per_word, stop - words.start * per_word)
        order = AWQ_ORDER if self._bits == 4 else None
        integers = unpacked(weight[:, words], self._bits, order)[:, cut].T
        piece_scales = scales[:, start:stop].T
        if not zeros:
            return Grouped(integers, piece_scales, np.full(piece_scales.shape, 1 << (self._bits - 1), np.int16))
        piece_zeros = unpacked(zeros[0][:, words], self._bits, order)[:, cut].T.astype(np.int16)
        return Grouped(integers, piece_scales, piece_zeros)

    @property
    def packing(self) -> Packing | None:
        """The packing that keeps the matrix in four bits; None if there is none."""
        dtype = np.float32 if self._has_zeros else self._scales
        return packing_for(self.group, minimum=self._has_zeros, dtype=dtype) if self._bits == 4 else None

    def integers(self, start: int, stop: int) -> Integers:
        """Return the stored integers of the outputs [start, stop)."""
        return self.grouped(start, stop).kept(self.group, self.packing)

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        return self.grouped(start, stop).values(np.arange(self.inputs) // self.group)


class GptqRows:
    """GPTQ: words [inputs * bits / 32, outputs], zeros [groups, outputs * bits / 32], scales [groups, outputs].

    `g_idx` [inputs] has the group of each input. Zeros are stored less one, unless `offset` is 0.
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
        weight, scales, *rest = self._held.take(stop - start)
        per_word, highest = 32 // self._bits, (1 << self._bits) - 1
        integers = unpacked(np.ascontiguousarray(weight[:, start:stop].T), self._bits)
        piece_scales = scales[:, start:stop].T
        if self._has_zeros:
            words = slice(start // per_word, -(-stop // per_word))
            cut = slice(start - words.start * per_word, stop - words.start * per_word)
            stored = unpacked(np.ascontiguousarray(rest[0][:, words]), self._bits)[:, cut].T
            zeros = (stored.astype(np.int16) + self._offset) & highest
        else:
            zeros = np.full(piece_scales.shape, 1 << (self._bits - 1), np.int16)
        consecutive = np.arange(self.inputs) // self.group
        groups = consecutive if self._groups is None else rest[-1].astype(np.int64) % len(scales)
        return Grouped(integers, piece_scales, zeros), groups

    @functools.cached_property
    def packing(self) -> Packing | None:
        """The packing that keeps the matrix in four bits; None where groups are not consecutive inputs."""
        if self._bits != 4 or not self._in_order():
            return None
        minimum = self._zeros is not None and not self._symmetric(self._zeros)
        return packing_for(self.group, minimum=minimum, dtype=np.float32 if minimum else self._scales)

    def integers(self, start: int, stop: int) -> Integers:
        """Return the stored integers of the outputs [start, stop)."""
        return self._read(start, stop)[0].kept(self.group, self.packing)

    def _symmetric(self, zeros: TensorEntry) -> bool:
        """True if all zeros are half of the integers' range."""
        return bool((rows_of(zeros, 0, zeros.shape[0]).view(np.uint32) == 0x11111111 * (8 - self._offset)).all())

    def _in_order(self) -> bool:
        if self._groups is None:
            return True
        stored = rows_of(self._groups, 0, self.inputs)
        return bool((stored == np.arange(self.inputs) // self.group).all())

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        piece, groups = self._read(start, stop)
        return piece.values(groups)


class PackedRows:
    """compressed-tensors' "pack-quantized": words [outputs, inputs * bits / 32] of integers plus half their range.

    Scales are [outputs, groups]; zeros, if there are any, are packed along the outputs.
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
        """Return the integers, scales and zeros of the outputs [start, stop)."""
        integers = unpacked(rows_of(self._weight, start, stop), self._bits)[:, : self.inputs]
        scales = rows_of(self._scales, start, stop).reshape(stop - start, -1)
        half = 1 << (self._bits - 1)
        if self._zeros is None:
            return Grouped(integers, scales, np.full(scales.shape, half, np.int16))
        per_word = 32 // self._bits
        first = start // per_word
        words = rows_of(self._zeros, first, -(-stop // per_word))
        zeros = unpacked(np.ascontiguousarray(words.T), self._bits).T[
            start - first * per_word : stop - first * per_word
        ]
        return Grouped(integers, scales, zeros.astype(np.int16))

    @property
    def packing(self) -> Packing | None:
        """The packing that keeps the matrix in four bits; None where inputs are in the order of their activations."""
        if self._bits != 4 or self._g_idx is not None or self.inputs % self.group:
            return None
        minimum = self._zeros is not None
        return packing_for(self.group, minimum=minimum, dtype=np.float32 if minimum else self._scales.numpy_dtype)

    def integers(self, start: int, stop: int) -> Integers:
        """Return the stored integers of the outputs [start, stop)."""
        return self.grouped(start, stop).kept(self.group, self.packing)

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        groups = np.arange(self.inputs) // self.group
        if self._g_idx is not None:
            stored = rows_of(self._g_idx, 0, self.inputs).astype(np.int64)
            groups = stored if stored.min(initial=0) >= 0 else groups
        return self.grouped(start, stop).values(groups)
