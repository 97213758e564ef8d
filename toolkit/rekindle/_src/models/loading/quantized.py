"""Hugging Face checkpoints that are quantised already: their `quantization_config`, and the numbers they stand for.

A scheme says which of the checkpoint's tensors make up a matrix, and how. Layers that a config leaves out have plain
weights, so a matrix is read by the tensors that are there. Scales of activations and of the KV cache are not used: both
are computed in the session's own precision. Errors name the field with an unsupported value.

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


def _expect(entry: TensorEntry | None, shape: tuple[int, ...], *dtypes: str) -> None:
    """Raise `CheckpointError` for a tensor that has another shape, or none of these dtypes."""
    if entry is not None and (entry.shape != shape or entry.dtype not in dtypes):
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
    if has_zeros and zeros is None:
        raise CheckpointError(f"{weight.file}: {base}.qzeros is missing, and zero_point is true.")
    _expect(zeros, (groups, outputs // per_word), "I32")
    rows = AwqRows(weight, scales, zeros, bits=bits, inputs=inputs, group=inputs // groups)
    return _entry(base, (outputs, inputs), f"AWQ, {bits} bits", rows, [weight, zeros, scales])


def gptq(base: str, entries: Entries, *, bits: int, group: int, offset: int) -> TensorEntry | None:
    """Return the entry of a matrix of GPTQ with zeros stored less `offset`."""
    weight, scales = entries.get(f"{base}.qweight"), entries.get(f"{base}.scales")
    if weight is None or scales is None or len(weight.shape) != 2:
        return None
    per_word = 32 // bits
    inputs, outputs = weight.shape[0] * per_word, weight.shape[1]
    groups = 1 if group == -1 else -(-inputs // group)
    zeros, order = entries.get(f"{base}.qzeros"), entries.get(f"{base}.g_idx")
    _expect(weight, (inputs // per_word, outputs), "I32")
    _expect(scales, (groups, outputs), *_SCALES)
    _expect(zeros, (groups, outputs // per_word), "I32")
    _expect(order, (inputs,), "I32", "I64")
    rows = GptqRows(weight, scales, zeros, order, bits=bits, inputs=inputs, group=inputs // groups)
    rows.offset = offset
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
        raise CheckpointError(f"{weight.file}: {base}.weight has no scale. Download it again.")
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
    _expect(stored, (2,), "I64", "I32")
    if stored is not None:  # the last word of a row may be used in part
        inputs = int(rows_of(stored, 0, 2)[1])
    groups = 1 if group is None else -(-inputs // group)
    zeros, order = entries.get(f"{base}.weight_zero_point"), entries.get(f"{base}.weight_g_idx")
    _expect(weight, (outputs, -(-inputs // per_word)), "I32")
    _expect(scale, (outputs, groups), *_SCALES)
    _expect(zeros, (-(-outputs // per_word), groups), "I32")
    _expect(order, (inputs,), "I32", "I64")
    rows = PackedRows(weight, scale, zeros, order, bits=bits, inputs=inputs, group=-(-inputs // groups))
    return _entry(base, (outputs, inputs), f"{bits} bits", rows, [weight, scale, zeros, order])


def four_bit_floats(
    base: str, entries: Entries, group: int, *, name: str = "weight_packed", whole: str | None = None
) -> TensorEntry | None:
    """Return the entry of a matrix of MXFP4, or of NVFP4 with scales divided or multiplied by one number per tensor.

    `name` and `whole` are the ends of the names of the matrix and of that number.
    """
    weight, scale = entries.get(f"{base}.{name}"), entries.get(f"{base}.weight_scale")
    if weight is None or len(weight.shape) != 2:
        return None
    outputs, inputs = weight.shape[0], weight.shape[1] * 2
    _expect(weight, (outputs, inputs // 2), "U8")
    number = entries.get(f"{base}.{whole}") if whole else None
    if scale is None or (whole and number is None):
        missing = "weight_scale" if scale is None else whole
        raise CheckpointError(f"{weight.file}: {base}.{missing} is missing. Download it again.")
    _expect(scale, (outputs, -(-inputs // group)), *(("F8_E4M3",) if whole else ("U8", "F8_E8M0")))
    if number is not None:
        _expect(number, number.shape if number.shape in ((), (1,)) else (1,), "F32")
    rows = FourBitFloatRows(weight, scale, number, divides=whole == "weight_global_scale")
    return _entry(base, (outputs, inputs), "NVFP4" if whole else "MXFP4", rows, [weight, scale, number])


class GroupedIntegers(NamedTuple):
    """Integers [outputs, inputs], and scales and zeros [outputs, groups]; zeros are half of the range by default."""

    integers: NDArray[np.uint8]
    scales: NDArray[Any]
    zeros: NDArray[Any] | None
    order: NDArray[Any] | None = None  # the group of each input; None: consecutive ones share one


def unpacked(words: NDArray[Any], bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.uint8]:
    """Return the integers [..., n * 32 / bits] of words [..., n], the lowest bits first, or in `order`."""
    places = np.arange(32 // bits) if order is None else np.asarray(order)
    shifts = (places * bits).astype(np.uint32)
    integers = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return integers.astype(np.uint8).reshape(*words.shape[:-1], -1)


class WholeTensors:
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


class IntegerRows:
    """Integers of `bits` in words of 32 bits, with a scale and perhaps a zero for each group of inputs."""

    def __init__(
        self,
        weight: TensorEntry,
        scales: TensorEntry,
        zeros: TensorEntry | None,
        order: TensorEntry | None = None,
        *,
        bits: int,
        inputs: int,
        group: int,
    ) -> None:
        self.weight, self.scales, self.zeros, self.order = weight, scales, zeros, order
        self.bits, self.inputs, self.group = bits, inputs, group
        tensors = (entry for entry in (weight, scales, zeros, order) if entry is not None)
        self.held = WholeTensors(scales.shape[-1], *tensors)

    def grouped(self, start: int, stop: int) -> GroupedIntegers:
        """Return the integers, scales and zeros of the outputs [start, stop)."""
        raise NotImplementedError

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        integers, scales, zeros, order = self.grouped(start, stop)
        groups = np.arange(self.inputs) // self.group if order is None else order
        zeros = self._half(scales) if zeros is None else zeros
        values: NDArray[np.float32] = (integers - zeros.astype(np.int16)[:, groups]).astype(np.float32)
        return values * scales.astype(np.float32)[:, groups]

    @functools.cached_property
    def packing(self) -> Packing | None:
        """The packing that keeps the matrix in four bits; None where groups are not consecutive inputs."""
        if self.bits != 4 or not self.is_consecutive():
            return None
        minimum = self.has_minimums()
        return packing_for(self.group, minimum=minimum, dtype=np.float32 if minimum else self.scales.numpy_dtype)

    def is_consecutive(self) -> bool:
        """True if each group consists of inputs side by side."""
        return self.order is None and self.inputs % self.group == 0

    def has_minimums(self) -> bool:
        """True if some zeros are not half of the integers' range."""
        return self.zeros is not None

    def integers(self, start: int, stop: int) -> Integers:
        """Return the integers of the outputs [start, stop) as matrices of four bits keep them.

        Their groups may be parts of the stored ones.
        """
        packing = self.packing
        assert packing is not None, "integers are asked for where they can be kept"
        integers, scales, zeros, _ = self.grouped(start, stop)
        kept = np.repeat(scales.astype(packing.scales), self.group // packing.group, axis=1)
        if not packing.minimum or zeros is None:
            return Integers(integers, kept)
        return Integers(
            integers, kept, -kept * np.repeat(zeros.astype(np.float32), self.group // packing.group, axis=1)
        )

    def _half(self, scales: NDArray[Any]) -> NDArray[np.int16]:
        return np.full(scales.shape, 1 << (self.bits - 1), np.int16)

    def words(self, start: int, stop: int) -> tuple[slice, slice]:
        """Return the words that hold the integers [start, stop), and the place of these in them."""
        per_word = 32 // self.bits
        first = start // per_word
        return slice(first, -(-stop // per_word)), slice(start - first * per_word, stop - first * per_word)


class AwqRows(IntegerRows):
    """AWQ's "gemm" layout: words [inputs, outputs / 8], zeros [groups, outputs / 8], scales [groups, outputs]."""

    def grouped(self, start: int, stop: int) -> GroupedIntegers:
        weight, scales, *zeros = self.held.take(stop - start)
        words, cut = self.words(start, stop)
        order = AWQ_ORDER if self.bits == 4 else None
        integers, *piece_zeros = (unpacked(part[:, words], self.bits, order)[:, cut].T for part in (weight, *zeros))
        return GroupedIntegers(integers, scales[:, start:stop].T, piece_zeros[0] if zeros else None)


class GptqRows(IntegerRows):
    """GPTQ: words [inputs * bits / 32, outputs], zeros [groups, outputs * bits / 32], scales [groups, outputs].

    `g_idx` [inputs] has the group of each input. Zeros are stored less one, unless `offset` is 0.
    """

    offset = 1

    def grouped(self, start: int, stop: int) -> GroupedIntegers:
        weight, scales, *rest = self.held.take(stop - start)
        integers = unpacked(np.ascontiguousarray(weight[:, start:stop].T), self.bits)
        zeros = None
        if self.zeros is not None:
            words, cut = self.words(start, stop)
            stored = unpacked(np.ascontiguousarray(rest[0][:, words]), self.bits)[:, cut].T
            zeros = (stored.astype(np.int16) + self.offset) & ((1 << self.bits) - 1)
        order = None if self.order is None else rest[-1].astype(np.int64) % len(scales)
        return GroupedIntegers(integers, scales[:, start:stop].T, zeros, order)

    def has_minimums(self) -> bool:
        if self.zeros is None:
            return False
        stored = rows_of(self.zeros, 0, self.zeros.shape[0]).view(np.uint32)
        return bool((stored != 0x11111111 * (8 - self.offset)).any())

    def is_consecutive(self) -> bool:
        if self.order is None:
            return True
        return bool((rows_of(self.order, 0, self.inputs) == np.arange(self.inputs) // self.group).all())


class PackedRows(IntegerRows):
    """compressed-tensors' "pack-quantized": words [outputs, inputs * bits / 32] of integers plus half their range.

    Scales are [outputs, groups]; zeros, if there are any, are packed along the outputs. With an order, inputs are in
    that of their activations.
    """

    def grouped(self, start: int, stop: int) -> GroupedIntegers:
        integers = unpacked(rows_of(self.weight, start, stop), self.bits)[:, : self.inputs]
        zeros = order = None
        if self.zeros is not None:
            words, cut = self.words(start, stop)
            stored = rows_of(self.zeros, words.start, words.stop)
            zeros = unpacked(np.ascontiguousarray(stored.T), self.bits).T[cut]
        if self.order is not None:
            order = rows_of(self.order, 0, self.inputs).astype(np.int64)
            order = order if order.min(initial=0) >= 0 else None
        return GroupedIntegers(integers, rows_of(self.scales, start, stop), zeros, order)


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
        return found if group in int4.STORED_GROUPS else None

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
    group = options.group("group_size", 16)
    return functools.partial(four_bit_floats, group=group, name="weight", whole="weight_scale_2")


def _mxfp4(options: Options) -> Scheme:
    return lambda base, entries: None  # experts alone are quantised, and `named_tensors.py` reads them


def compressed(options: Options) -> Scheme:
    """Return a function that makes the entry of a matrix. Of several groups it takes the one with fitting sizes.

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
        return functools.partial(four_bit_floats, group=group, whole="weight_global_scale" if nvidia else None)
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
