"""The option `quantize`: the bits of the matrices of each part of a model. It is read here without JAX.

A plan is one of KINDS for the whole model, or one for each part. A config keeps text, in one form for
equal plans: `int4`, or `attention=int8,mlp=int4` with parts in the order of PARTS.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, get_args

from rekindle._src.core.options import QuantizeKind, QuantizePart
from rekindle.errors import ConfigError

KINDS: tuple[QuantizeKind, ...] = get_args(QuantizeKind)
PARTS: tuple[QuantizePart, ...] = get_args(QuantizePart)
_KINDS, _PARTS = ", ".join(map(repr, KINDS)), ", ".join(map(repr, PARTS))
_EXAMPLE = 'such as {"mlp": "int4", "attention": "int8"}'


def checked_quantize(value: Any) -> str | None:
    """Return the option `quantize` as a config keeps it. Raises ConfigError for a value that is no plan."""
    if value is None or (isinstance(value, str) and value in KINDS):
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
        if not isinstance(part, str) or part not in PARTS:
            raise ConfigError("quantize", value, f"names the part {part!r}, which no model has", f"Use {_PARTS}")
        if kind is not None and not (isinstance(kind, str) and kind in KINDS):
            raise ConfigError("quantize", value, f"{part!r} is {kind!r}, which is not known", f"Use None, {_KINDS}")
    if not named:
        raise ConfigError("quantize", value, "names no part", f"Use some of {_PARTS}, or None")
    return ",".join(f"{part}={named[part]}" for part in PARTS if named.get(part) is not None) or None


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
        return {part: outer if part in ("embedding", "head") else plan for part in PARTS}
    kinds_by_part = dict(part.split("=") for part in plan.split(","))
    for part, leader in (("experts", "mlp"), ("head", "embedding")):
        if leader in kinds_by_part:
            kinds_by_part.setdefault(part, kinds_by_part[leader])
    return kinds_by_part
