"""The configs of compressed-tensors: groups of layers, each with a format and the numbers of its weights."""

from __future__ import annotations

from collections.abc import Callable

from rekindle._src.models.loading.quantized import matrices
from rekindle._src.models.loading.quantized.matrices import Entries
from rekindle._src.models.loading.quantized.options import Options
from rekindle._src.models.loading.tensor_files import TensorEntry
from rekindle.errors import CheckpointError, UnsupportedModel

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
)  # fmt: skip
_MOST = 64  # groups of a config
Matrix = Callable[[str, Entries], TensorEntry | None]


def compressed(options: Options) -> Matrix:
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
    if not 1 <= len(layer_groups.raw) <= _MOST:
        raise UnsupportedModel(f"{layer_groups.where} has {len(layer_groups.raw)} groups; 1 to {_MOST} are read.")
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


def _group(options: Options, top: object) -> Matrix:
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
        return lambda base, entries: matrices.packed(base, entries, bits, None if group == -1 else group)
    if form in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
        nvidia = form.startswith("nv")
        weights.choice("num_bits", (4,), 4)
        group = weights.group("group_size", 16 if nvidia else 32)
        return lambda base, entries: matrices.four_bit_floats(base, entries, group, nvidia=nvidia)
    weights.choice("num_bits", (8,))
    weights.choice("symmetric", (True,), True)
    weights.choice("strategy", ("tensor", "channel", "block"), "tensor")
    kind = weights.choice("type", ("int", "float"), "float" if form == "float-quantized" else "int")
    block = weights.block("block_structure") if strategy == "block" else None
    dtypes = ("I8",) if kind == "int" else matrices.FP8
    return lambda base, entries: matrices.scaled(base, entries, block, dtypes)
