"""The options `dtype`, `kv_dtype` and `quantize`: how numbers are stored. They are read here without JAX.

`jnp.bfloat16`, `np.dtype("float32")`, `torch.float16`, "bf16" and "fp16" all become one of the names of `DType`. None
of those libraries is imported.

A plan of `quantize` is one of QUANTIZE_KINDS for the whole model, or one for each part. A config keeps text, in one
form for equal plans: `int4`, or `attention=int8,mlp=int4` with parts in the order of QUANTIZE_PARTS.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

from rekindle._src.core.names import nearest
from rekindle.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["auto", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "int8-int4", "int4"]
ShortDType = Literal["bf16", "f16", "fp16", "half", "f32", "fp32"]


class NamedDType(Protocol):
    """A dtype of numpy's, such as `np.dtype("float32")`."""

    @property
    def name(self) -> str: ...
    @property
    def itemsize(self) -> int: ...


DTypeLike = DType | ShortDType | type[Any] | NamedDType  # types are those of numpy and JAX, such as jnp.bfloat16
KVDTypeLike = KVDType | ShortDType | Literal["fp8", "f8", "i8", "k8v4", "i4"] | type[Any] | NamedDType
QuantizeKind = Literal["int8", "int8-weight", "int4", "int4-32", "int4-64", "int4-128"]
QuantizePart = Literal["attention", "mlp", "experts", "embedding", "head"]
Quantize = QuantizeKind | Mapping[QuantizePart, QuantizeKind | None]

DTYPES: tuple[DType, ...] = get_args(DType)
KV_DTYPES: tuple[KVDType, ...] = get_args(KVDType)
SHORT = {
    "bf16": "bfloat16", "f16": "float16", "fp16": "float16", "half": "float16", "f32": "float32", "fp32": "float32",
    "fp8": "float8_e4m3fn", "f8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "i8": "int8",
    "k8v4": "int8-int4", "i4": "int4",
}  # fmt: skip
_FEWER_BITS = (
    "int8",
    "i8",
    "int4",
    "8bit",
    "4bit",
    "8-bit",
    "4-bit",
    "q8_0",
    "q4_0",
)  # values of dtype= that mean quantize=


def dtype_name(value: object) -> str:
    """Return numpy's name of a dtype, such as "bfloat16"; for other objects some text, or "" if they have none."""
    try:
        name = value if isinstance(value, str) else getattr(value, "name", None) or getattr(value, "__name__", None)
        text = str(value if name is None else name)
    except Exception:  # any object may arrive here
        return ""
    text = text.strip().casefold().removeprefix("torch.")
    return SHORT.get(text, text)


def checked_dtype(field: str, value: object, known: Sequence[str] = DTYPES) -> str:
    """Return the name of a dtype, which is one of `known`. Raises ConfigError for anything else."""
    name = dtype_name(value)
    if name in known:
        return name
    if field == "dtype" and name in _FEWER_BITS:
        bits = "int4" if "4" in name else "int8"
        raise ConfigError(field, value, "is no dtype of whole weights", f"Use quantize={bits!r}, an option of its own")
    close = nearest(name, (*known, *SHORT), 0.8)
    suggestion = "" if not close else f"Did you mean {SHORT.get(close, close)!r}? "
    raise ConfigError(field, value, "is not known", f"{suggestion}Use one of {', '.join(map(repr, known))}")


QUANTIZE_KINDS: tuple[QuantizeKind, ...] = get_args(QuantizeKind)
QUANTIZE_PARTS: tuple[QuantizePart, ...] = get_args(QuantizePart)
_KINDS, _PARTS = ", ".join(map(repr, QUANTIZE_KINDS)), ", ".join(map(repr, QUANTIZE_PARTS))
_EXAMPLE = 'such as {"mlp": "int4", "attention": "int8"}'


def checked_quantize(value: object) -> str | None:
    """Return the option `quantize` as a config keeps it. Raises ConfigError for anything but a plan."""
    if value is None or (isinstance(value, str) and value in QUANTIZE_KINDS):
        return value
    if isinstance(value, str) and "=" in value:
        pairs = [part.strip().partition("=") for part in value.split(",")]
        kinds_by_part = {name: kind for name, _, kind in pairs}
        if len(kinds_by_part) < len(pairs):
            raise ConfigError("quantize", value, "names a part twice", "Name each once")
        return _text({name: None if kind == "none" else kind for name, kind in kinds_by_part.items()}, value)
    if isinstance(value, Mapping):
        try:
            kinds_by_part = dict(value)
        except Exception:
            raise ConfigError("quantize", value, "can't be read as a dict", f"Pass one {_EXAMPLE}") from None
        return _text(kinds_by_part, value)
    raise ConfigError("quantize", value, "is not known", f"Use one of None, {_KINDS}, or a dict {_EXAMPLE}")


def _text(named: Mapping[Any, Any], value: Any) -> str | None:
    for part, kind in named.items():
        if not isinstance(part, str) or part not in QUANTIZE_PARTS:
            raise ConfigError("quantize", value, f"names the part {part!r}, which no model has", f"Use {_PARTS}")
        if kind is not None and not (isinstance(kind, str) and kind in QUANTIZE_KINDS):
            raise ConfigError("quantize", value, f"{part!r} is {kind!r}, which is not known", f"Use None, {_KINDS}")
    if not named:
        raise ConfigError("quantize", value, "names no part", f"Use some of {_PARTS}, or None")
    return ",".join(f"{part}={named[part]}" for part in QUANTIZE_PARTS if named.get(part) is not None) or None


@functools.lru_cache(maxsize=64)
def kinds_of(plan: str | None) -> Mapping[str, str]:
    """Return the kind of each part that a plan quantises. The plan is as `checked_quantize` returns it.

    Embedding and head stay in 8 bits where the whole model has 4. Experts follow the MLPs, and the head the embedding,
    where a plan does not name them.
    """
    if plan is None:
        return {}
    if "=" not in plan:
        outer = "int8" if plan.startswith("int4") else plan
        return {part: outer if part in ("embedding", "head") else plan for part in QUANTIZE_PARTS}
    kinds_by_part = dict(part.split("=") for part in plan.split(","))
    for part, leader in (("experts", "mlp"), ("head", "embedding")):
        if leader in kinds_by_part:
            kinds_by_part.setdefault(part, kinds_by_part[leader])
    return kinds_by_part
