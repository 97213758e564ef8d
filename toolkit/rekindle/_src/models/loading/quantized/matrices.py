"""The entries of quantised matrices: the tensors of each, checked against the sizes in the config."""

from __future__ import annotations

from collections.abc import Mapping

from rekindle._src.models.loading.quantized.integers import AwqRows, GptqRows, PackedRows
from rekindle._src.models.loading.quantized.scaled import FourBitFloatRows, ScaledRows
from rekindle._src.models.loading.rows_of import rows_of
from rekindle._src.models.loading.tensor_files import ReadRows, TensorEntry
from rekindle.errors import CheckpointError

Entries = Mapping[str, TensorEntry]
FP8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("F16", "BF16", "F32")


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
