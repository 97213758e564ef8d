"""The schemes of a `quantization_config`: which of the checkpoint's tensors make up a matrix, and how.

Layers that a config leaves out have plain weights, so a matrix is read by the tensors that are there. Scales of
activations and of the KV cache are not used: both are computed in the session's own precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rekindle._src.models.loading.quantized import matrices
from rekindle._src.models.loading.quantized.compressed import compressed
from rekindle._src.models.loading.quantized.matrices import Entries
from rekindle._src.models.loading.quantized.options import Options
from rekindle._src.models.loading.tensor_files import TensorEntry
from rekindle.errors import UnsupportedModel

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


_METHODS: dict[str, Callable[[Options], Scheme]] = {
    "awq": _awq, "gptq": _gptq, "fp8": _fp8, "fbgemm_fp8": _fbgemm, "modelopt": _modelopt,
    "compressed-tensors": compressed,
}  # fmt: skip
