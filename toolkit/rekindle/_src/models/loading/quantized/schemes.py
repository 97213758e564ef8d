"""The schemes of a `quantization_config`: which of the checkpoint's tensors make up a matrix, and how.

Layers that a config leaves out have plain weights, so a matrix is read by the tensors that are there. Scales of
activations and of the KV cache are not used: both are computed in the session's own precision. Configs of
compressed-tensors have groups of layers, each with a format and the numbers of its weights. Errors name the field
whose value is not read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rekindle._src.models.loading.quantized import matrices
from rekindle._src.models.loading.quantized.matrices import Entries
from rekindle._src.models.loading.tensor_files import TensorEntry
from rekindle.errors import CheckpointError, UnsupportedModel

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
        matrices.awq,
        bits=options.choice("bits", (4, 8), options.get("w_bit", 4)),
        group=options.group("group_size", options.get("q_group_size", 128)),
        has_zeros=bool(options.get("zero_point", True)),
    )


def _gptq(options: Options) -> Scheme:
    form = options.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return functools.partial(
        matrices.gptq,
        bits=options.choice("bits", (2, 4, 8)),
        group=options.group("group_size", -1),
        offset=1 if form == "gptq" else 0,
    )


def _fp8(options: Options) -> Scheme:
    options.choice("fmt", ("e4m3", "e5m2"), "e4m3")
    return functools.partial(matrices.scaled, block=options.block("weight_block_size"))


def _fbgemm(options: Options) -> Scheme:
    return functools.partial(matrices.scaled, block=None, dtypes=("F8_E4M3",))


def _modelopt(options: Options) -> Scheme:
    if options.choice("quant_algo", ("FP8", "NVFP4")) == "FP8":
        return functools.partial(matrices.scaled, block=None, dtypes=("F8_E4M3",))
    return functools.partial(matrices.modelopt_floats, group=options.group("group_size", 16))


def _mxfp4(options: Options) -> Scheme:
    return lambda base, entries: None  # experts alone are quantised, and `fused_experts.py` reads them


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


_METHODS: dict[str, Callable[[Options], Scheme]] = {
    "awq": _awq, "gptq": _gptq, "fp8": _fp8, "fbgemm_fp8": _fbgemm, "modelopt": _modelopt,
    "compressed-tensors": compressed, "mxfp4": _mxfp4,
}  # fmt: skip
