"""Hugging Face checkpoints that are quantised already: their `quantization_config`, and the numbers they stand for.

A scheme says which of the checkpoint's tensors make up a matrix, and how. Layers that a config leaves out have plain
weights, so a matrix is read by the tensors that are there. Scales of activations and of the KV cache are not used: both
are computed in the session's own precision. Errors name the field whose value is not read.

Integers stand for scale * (integer - zero), with a scale for each group of inputs. They are packed into words of 32
bits in the orders of AWQ, GPTQ and compressed-tensors. Scales have 16 bits as a rule, so that a product with the
difference of two small integers is exact in float32. Small floats are fp8, and the 4-bit floats of MXFP4 and NVFP4.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.loading.four_bits import Integers, packing_for
from rekindle._src.models.loading.tensor_files import ReadRows, TensorEntry, rows_of
from rekindle._src.models.nn.packing import Packing
from rekindle.errors import CheckpointError, UnsupportedModel
from rekindle_kernels import int4

Entries = Mapping[str, TensorEntry]
FP8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("F16", "BF16", "F32")
# The place in a word of eight integers: AWQ interleaves them.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_TWICE = (2 * _E2M1).astype(np.int8)


def _entry(
    base: str, shape: tuple[int, ...], kind: str, rows: ReadRows, parts: list[TensorEntry | None]
) -> TensorEntry:
    """Return the entry of a matrix that is made of several tensors."""
    first = next(part for part in parts if part is not None)
    size = sum(part.nbytes for part in parts if part is not None)
    return TensorEntry(f"{base}.weight", first.file, kind, shape, first.offset, size, rows)


def _expect(entry: TensorEntry, shape: tuple[int, ...], *dtypes: str) -> None:
    """Raise `CheckpointError` unless a tensor has this shape and one of these dtypes."""
    if entry.shape != shape or entry.dtype not in dtypes:
        raise CheckpointError(
            f"{entry.file}: {entry.name} is {entry.dtype} {[*entry.shape]}, expected {' or '.join(dtypes)} {[*shape]} "
            "by the quantization_config. Check that config.json and the weights belong together."
        )


def awq(base: str, entries: Entries, *, bits: int, group: int, has_zeros: bool) -> TensorEntry | None:
    """Return the entry of a matrix of AWQ; `group` is -1 for one scale of each output."""
    weight, scales = entries.get(f"{base}.qweight"), entries.get(f"{base}.scales")
    if weight is None or scales is None or len(weight.shape) != 2:
        return None
    per_word = 32 // bits
    inputs, outputs = weight.shape[0], weight.shape[1] * per_word
    groups = 1 if group == -1 else -(-inputs // group)
    zeros = entries.get(f"{base}.qzeros") if has_zeros else None
    _expect(weight, (inputs, outputs // per_word), "I32")
    _expect(scales, (groups, outputs), *_SCALES)
    if has_zeros:
        if zeros is None:
            raise CheckpointError(f"{weight.file}: {base}.qzeros is missing, and zero_point is true.")
        _expect(zeros, (groups, outputs // per_word), "I32")
    rows = AwqRows(weight, zeros, scales, bits)
    return _entry(base, (outputs, inputs), f"AWQ, {bits} bits", rows, [weight, zeros, scales])


def gptq(base: str, entries: Entries, *, bits: int, group: int, offset: int) -> TensorEntry | None:
    """Return the entry of a matrix of GPTQ, whose zeros are stored less `offset`."""
    weight, scales = entries.get(f"{base}.qweight"), entries.get(f"{base}.scales")
    if weight is None or scales is None or len(weight.shape) != 2:
        return None
    per_word = 32 // bits
    inputs, outputs = weight.shape[0] * per_word, weight.shape[1]
    groups = 1 if group == -1 else -(-inputs // group)
    zeros, order = entries.get(f"{base}.qzeros"), entries.get(f"{base}.g_idx")
    _expect(weight, (inputs // per_word, outputs), "I32")
    _expect(scales, (groups, outputs), *_SCALES)
    if zeros is not None:
        _expect(zeros, (groups, outputs // per_word), "I32")
    if order is not None:
        _expect(order, (inputs,), "I32", "I64")
    rows = GptqRows(weight, zeros, scales, order, bits=bits, offset=offset)
    return _entry(base, (outputs, inputs), f"GPTQ, {bits} bits", rows, [weight, zeros, scales, order])


def scaled(
    base: str, entries: Entries, block: tuple[int, int] | None, dtypes: tuple[str, ...] = FP8
) -> TensorEntry | None:
    """Return the entry of a matrix of fp8 or int8, with a scale of the tensor, of each output, or of each block."""
    weight = entries.get(f"{base}.weight")
    scale = entries.get(f"{base}.weight_scale_inv", entries.get(f"{base}.weight_scale"))
    if weight is None or len(weight.shape) != 2:
        return None
    outputs, inputs = weight.shape
    _expect(weight, (outputs, inputs), *dtypes)
    if scale is None:
        raise CheckpointError(f"{weight.file}: {base}.weight has no scale beside it. Download it again.")
    shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (outputs,), (outputs, 1)]
    if block is not None:
        shapes = [(-(-outputs // block[0]), -(-inputs // block[1]))]
    _expect(scale, scale.shape if scale.shape in shapes else shapes[-1], *_SCALES)
    rows = ScaledRows(weight, scale, block)
    return _entry(base, (outputs, inputs), weight.dtype, rows, [weight, scale])


def packed(base: str, entries: Entries, bits: int, group: int | None) -> TensorEntry | None:
    """Return the entry of compressed-tensors' packed integers; `group` is None for one scale of each output."""
    weight, scale = entries.get(f"{base}.weight_packed"), entries.get(f"{base}.weight_scale")
    if weight is None or scale is None or len(weight.shape) != 2 or len(scale.shape) != 2:
        return None
    per_word, outputs = 32 // bits, weight.shape[0]
    inputs = weight.shape[1] * per_word
    stored = entries.get(f"{base}.weight_shape")
    if stored is not None:  # the last word of a row may be used in part
        _expect(stored, (2,), "I64", "I32")
        inputs = int(rows_of(stored, 0, 2)[1])
    groups = 1 if group is None else -(-inputs // group)
    zeros, order = entries.get(f"{base}.weight_zero_point"), entries.get(f"{base}.weight_g_idx")
    _expect(weight, (outputs, -(-inputs // per_word)), "I32")
    _expect(scale, (outputs, groups), *_SCALES)
    if zeros is not None:
        _expect(zeros, (-(-outputs // per_word), groups), "I32")
    if order is not None:
        _expect(order, (inputs,), "I32", "I64")
    rows = PackedRows(weight, scale, zeros, order, bits=bits, inputs=inputs)
    return _entry(base, (outputs, inputs), f"{bits} bits", rows, [weight, scale, zeros, order])


def four_bit_floats(base: str, entries: Entries, group: int, *, nvidia: bool) -> TensorEntry | None:
    """Return the entry of a matrix of MXFP4 or NVFP4."""
    weight, scale = entries.get(f"{base}.weight_packed"), entries.get(f"{base}.weight_scale")
    if weight is None or scale is None or len(weight.shape) != 2:
        return None
    outputs, inputs = weight.shape[0], weight.shape[1] * 2
    whole = entries.get(f"{base}.weight_global_scale") if nvidia else None
    _expect(weight, (outputs, inputs // 2), "U8")
    _expect(scale, (outputs, -(-inputs // group)), *(("F8_E4M3",) if nvidia else ("U8", "F8_E8M0")))
    if nvidia:
        if whole is None:
            raise CheckpointError(f"{weight.file}: {base}.weight_global_scale is missing. Download it again.")
        _expect(whole, whole.shape if whole.shape in ((), (1,)) else (1,), "F32")
    rows = FourBitFloatRows(weight, scale, whole)
    return _entry(base, (outputs, inputs), "NVFP4" if nvidia else "MXFP4", rows, [weight, scale, whole])


def modelopt_floats(base: str, entries: Entries, *, group: int) -> TensorEntry | None:
    """Return the entry of a matrix of ModelOpt's NVFP4, whose scales are multiplied by one number for the tensor."""
    weight, scale = entries.get(f"{base}.weight"), entries.get(f"{base}.weight_scale")
    if weight is None or len(weight.shape) != 2:
        return None
    outputs, inputs = weight.shape[0], weight.shape[1] * 2
    _expect(weight, (outputs, inputs // 2), "U8")
    whole = entries.get(f"{base}.weight_scale_2")
    if scale is None or whole is None:
        missing = "weight_scale" if scale is None else "weight_scale_2"
        raise CheckpointError(f"{weight.file}: {base}.{missing} is missing. Download it again.")
    _expect(scale, (outputs, -(-inputs // group)), "F8_E4M3")
    _expect(whole, whole.shape if whole.shape in ((), (1,)) else (1,), "F32")
    rows = FourBitFloatRows(weight, scale, whole, divides=False)
    return _entry(base, (outputs, inputs), "NVFP4", rows, [weight, scale, whole])


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


class ScaledRows:
    """value = weight * scale, one scale for the tensor, for each output, or for each block of outputs and inputs."""

    def __init__(self, weight: TensorEntry, scale: TensorEntry, block: tuple[int, int] | None = None) -> None:
        self._weight, self._scale, self._block = weight, scale, block

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        weight = rows_of(self._weight, start, stop).astype(np.float32)
        if self._block is None:
            if int(np.prod(self._scale.shape)) == 1:
                return weight * rows_of(self._scale._replace(shape=(1,)), 0, 1).astype(np.float32)
            return weight * rows_of(self._scale, start, stop).astype(np.float32).reshape(stop - start, 1)
        height, width = self._block
        first = start // height
        scale = rows_of(self._scale, first, -(-stop // height)).astype(np.float32)
        spread = scale[np.arange(start, stop) // height - first]
        return weight * np.repeat(spread, width, axis=1)[:, : weight.shape[1]]


class FourBitFloatRows:
    """Floats of 4 bits (E2M1), two in each byte, with a scale for every 32 (MXFP4) or 16 (NVFP4) inputs.

    Scales of MXFP4 are exponents of 8 bits. Those of NVFP4 are fp8, and one number for the whole tensor divides them,
    or multiplies them.
    """

    def __init__(
        self, weight: TensorEntry, scale: TensorEntry, whole: TensorEntry | None = None, *, divides: bool = True
    ) -> None:
        self._weight, self._scale, self._whole, self._divides = weight, scale, whole, divides

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        values, scale = _E2M1[self._levels(start, stop)], self._scales(start, stop)
        return values * np.repeat(scale, values.shape[1] // scale.shape[1], axis=1)

    @property
    def packing(self) -> Packing | None:
        """The packing that keeps the matrix: as indices where scales are exponents, else in six bits, since twice the
        values are integers from -12 to 12."""
        inputs, groups = 2 * self._weight.shape[1], self._scale.shape[1]
        group = inputs // groups if groups and inputs % groups == 0 else 0
        found = Packing(group, scales=int4.EXPONENTS, codes=True)
        found = found if self._whole is None and group in int4.GROUPS else found.as_integers
        return found if group in int4.GROUPS_OF[found.bits] else None

    def integers(self, start: int, stop: int) -> Integers:
        """Return the integers of the outputs [start, stop) with half of the scales, or indices with exponents."""
        if self.packing is not None and self.packing.codes:
            return Integers(self._levels(start, stop), rows_of(self._scale, start, stop).view(int4.EXPONENTS))
        return Integers(_TWICE[self._levels(start, stop)], self._scales(start, stop) * np.float32(0.5))

    def _levels(self, start: int, stop: int) -> NDArray[np.uint8]:
        packed = rows_of(self._weight, start, stop)
        levels: NDArray[np.uint8] = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
        return levels

    def _scales(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return the scales [outputs, groups]."""
        stored = rows_of(self._scale, start, stop)
        if self._whole is None:
            return stored.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        whole = rows_of(self._whole._replace(shape=(1,)), 0, 1).astype(np.float32)
        return stored.astype(np.float32) / whole if self._divides else stored.astype(np.float32) * whole


# Makes the entry of a matrix from its name without ".weight"; None if the checkpoint stores it in another way.
Scheme = Callable[[str, Entries], TensorEntry | None]
# Tensors that belong to quantised layers and that reading the weights does not need.
NOT_WEIGHTS = (
    r".*\.(input|k|v|q|output)_scale", r".*\.(input|output)_zero_point", r".*\.input_global_scale",
    r".*\.activation_scale",
)  # fmt: skip
_ENDINGS = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx",
    "weight_shape", "weight_scale_inv", "weight_global_scale", "weight_scale_2",
)  # fmt: skip
_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
)  # fmt: skip
_MOST_GROUPS = 64  # groups of a config


class Options:
    """A `quantization_config`, or an object within it; `where` names it in errors."""

    def __init__(self, raw: Any, where: str = "quantization_config") -> None:
        if not isinstance(raw, Mapping):
            raise UnsupportedModel(f"{where} holds {_shown(raw)} where an object is expected. Download it again.")
        self.raw, self.where = dict(raw), where

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field's value, or `default` where it is absent or null."""
        value = self.raw.get(name)
        return default if value is None else value

    def choice(self, name: str, accepted: tuple[Any, ...], default: Any = None) -> Any:
        """Return a field that has one of the accepted values. Otherwise `UnsupportedModel` names the field."""
        value = self.get(name, default)
        if isinstance(value, (dict, list)) or value not in accepted:
            raise UnsupportedModel(
                f"{self.where}.{name}={_shown(value)} is not implemented. Implemented: "
                f"{', '.join(repr(one) for one in accepted)}."
            )
        return value

    def group(self, name: str = "group_size", default: int | None = None) -> int:
        """Return the number of inputs that share a scale; -1 for all of them."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or 1 <= value <= 1 << 20):
            raise UnsupportedModel(f"{self.where}.{name}={_shown(value)} is not a number of inputs. Check config.json.")
        return value

    def block(self, name: str) -> tuple[int, int] | None:
        """Return the sizes of blocks that share a scale, [outputs, inputs]; None where the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
            raise UnsupportedModel(f"{self.where}.{name}={_shown(value)} is not a pair of sizes. Check config.json.")
        return value[0], value[1]

    def inner(self, name: str) -> Options:
        """Return an object within this one."""
        return Options(self.raw.get(name), f"{self.where}.{name}")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def scheme(raw: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a config.json, None for plain weights. `UnsupportedModel` names the field at fault."""
    fields = raw.get("quantization_config", raw.get("compression_config"))
    if not fields:
        return None
    options = Options(fields)
    method = options.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedModel(
            f"quantization_config.quant_method={str(method)[:80]!r} is not implemented. Implemented: "
            f"{', '.join(sorted(_METHODS))}. Open the unquantised checkpoint with quantize='int8'."
        )
    return _METHODS[method](options)


def with_matrices(entries: dict[str, TensorEntry], names: Iterable[str], found: Scheme) -> dict[str, TensorEntry]:
    """Return the entries, with one for each quantised matrix in the place of the tensors that store it."""
    result = dict(entries)
    for name in names:
        plain = entries.get(name)
        if not name.endswith(".weight") or (plain is not None and plain.has_numbers):
            continue
        base = name.removesuffix(".weight")
        matrix = found(base, entries)
        if matrix is not None:
            for ending in _ENDINGS:
                result.pop(f"{base}.{ending}", None)
            result[name] = matrix
    return result


def _awq(options: Options) -> Scheme:
    options.choice("version", ("gemm", "GEMM"), "gemm")
    return functools.partial(
        awq,
        bits=options.choice("bits", (4, 8), options.get("w_bit", 4)),
        group=options.group("group_size", options.get("q_group_size", 128)),
        has_zeros=bool(options.get("zero_point", True)),
    )


def _gptq(options: Options) -> Scheme:
    form = options.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return functools.partial(
        gptq,
        bits=options.choice("bits", (2, 4, 8)),
        group=options.group("group_size", -1),
        offset=1 if form == "gptq" else 0,
    )


def _fp8(options: Options) -> Scheme:
    options.choice("fmt", ("e4m3", "e5m2"), "e4m3")
    return functools.partial(scaled, block=options.block("weight_block_size"))


def _fbgemm(options: Options) -> Scheme:
    return functools.partial(scaled, block=None, dtypes=("F8_E4M3",))


def _modelopt(options: Options) -> Scheme:
    if options.choice("quant_algo", ("FP8", "NVFP4")) == "FP8":
        return functools.partial(scaled, block=None, dtypes=("F8_E4M3",))
    return functools.partial(modelopt_floats, group=options.group("group_size", 16))


def _mxfp4(options: Options) -> Scheme:
    return lambda base, entries: None  # experts alone are quantised, and `named_tensors.py` reads them


def compressed(options: Options) -> Scheme:
    """Return a function that makes the entry of a matrix. Of several groups it takes the one whose sizes fit.

    The names of layers that a group lists are not compared: they may be expressions of any kind.
    """
    options.choice("quantization_status", ("compressed", "frozen"), "compressed")
    if options.get("sparsity_config"):
        options.inner("sparsity_config").choice("format", ("dense",), "dense")
    if options.get("transform_config"):
        raise UnsupportedModel(
            "quantization_config.transform_config (rotated weights) is not implemented. Open another checkpoint."
        )
    layer_groups = options.inner("config_groups")
    if not 1 <= len(layer_groups.raw) <= _MOST_GROUPS:
        raise UnsupportedModel(
            f"{layer_groups.where} has {len(layer_groups.raw)} groups; 1 to {_MOST_GROUPS} are read."
        )
    top = options.get("format")
    groups = [_group(layer_groups.inner(str(name)), top) for name in layer_groups.raw]

    def matrix(base: str, entries: Entries) -> TensorEntry | None:
        first: CheckpointError | None = None
        for group in groups:
            try:
                entry = group(base, entries)
            except CheckpointError as error:
                first = first or error
                continue
            if entry is not None:
                return entry
        if first is not None:
            raise first
        return None

    return matrix


def _group(options: Options, top: object) -> Scheme:
    if options.get("format") is None:
        options.raw["format"] = top
    form = options.choice("format", _FORMATS)
    weights = options.inner("weights")
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block", "tensor_group"), "tensor")
    if form == "pack-quantized":
        bits = weights.choice("num_bits", (4, 8))
        weights.choice("type", ("int",), "int")
        weights.choice("strategy", ("channel", "group"))
        group = weights.group() if strategy == "group" else None
        return lambda base, entries: packed(base, entries, bits, None if group == -1 else group)
    if form in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
        nvidia = form.startswith("nv")
        weights.choice("num_bits", (4,), 4)
        group = weights.group("group_size", 16 if nvidia else 32)
        return lambda base, entries: four_bit_floats(base, entries, group, nvidia=nvidia)
    weights.choice("num_bits", (8,))
    weights.choice("symmetric", (True,), True)
    weights.choice("strategy", ("tensor", "channel", "block"), "tensor")
    kind = weights.choice("type", ("int", "float"), "float" if form == "float-quantized" else "int")
    block = weights.block("block_structure") if strategy == "block" else None
    dtypes = ("I8",) if kind == "int" else FP8
    return lambda base, entries: scaled(base, entries, block, dtypes)


_METHODS: dict[str, Callable[[Options], Scheme]] = {
    "awq": _awq, "gptq": _gptq, "fp8": _fp8, "fbgemm_fp8": _fbgemm, "modelopt": _modelopt,
    "compressed-tensors": compressed, "mxfp4": _mxfp4,
}  # fmt: skip
