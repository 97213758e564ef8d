"""Names of dtypes: text with the usual abbreviations, or dtypes of numpy, JAX or torch.

`jnp.bfloat16`, `np.dtype("float32")`, `torch.float16`, "bf16" and "fp16" all become one of the names of
`options.DType`. None of those libraries is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from rekindle._src.core.options import DType, KVDType
from rekindle.errors import ConfigError

DTYPES: tuple[DType, ...] = get_args(DType)
KV_DTYPES: tuple[KVDType, ...] = get_args(KVDType)
SHORT = {
    "bf16": "bfloat16", "f16": "float16", "fp16": "float16", "half": "float16", "f32": "float32", "fp32": "float32",
    "fp8": "float8_e4m3fn", "f8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "i8": "int8",
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


def checked_dtype(field: str, value: Any, known: Sequence[str] = DTYPES) -> str:
    """Return the name of a dtype, which is one of `known`. Raises ConfigError for anything else."""
    name = dtype_name(value)
    if name in known:
        return name
    if field == "dtype" and name in _FEWER_BITS:
        bits = "int4" if "4" in name else "int8"
        raise ConfigError(field, value, "is no dtype of whole weights", f"Use quantize={bits!r}, an option of its own")
    close = difflib.get_close_matches(name, (*known, *SHORT), n=1, cutoff=0.8)
    suggestion = "" if not close else f"Did you mean {SHORT.get(close[0], close[0])!r}? "
    raise ConfigError(field, value, "is not known", f"{suggestion}Use one of {', '.join(map(repr, known))}")
