"""The option `rope_scaling` of `open()`: a stretch of a model's rotary positions beyond its own context."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rekindle._src.core.options import Refusal

KINDS = ("yarn", "linear")
MOST_FACTOR, MOST_POSITIONS = 64.0, 1 << 24
_FIX = 'Use "yarn:4", "linear:2", or {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}'
_ORIGINAL = "original_max_position_embeddings"
_NUMBERS = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attention_factor"}
_PART = re.compile(r"([a-z_]{1,20})([:=])([0-9]{1,20}(?:\.[0-9]{0,20})?(?:e[+-]?[0-9]{1,3})?)")
_LONGEST = 256  # characters of a text


class RopeScaling(NamedTuple):
    """How a model's rotary positions are stretched."""

    kind: str  # "yarn" or "linear"
    factor: float
    original: int | None = None  # positions that the model was trained with; None: as its config says
    ramp: tuple[tuple[str, float], ...] = ()  # of YaRN: the other keys of transformers' rope_scaling

    def __str__(self) -> str:
        original = "" if self.original is None else f",original={self.original}"
        ramp = "".join(f",{name}={value!r}" for name, value in self.ramp)
        return f"{self.kind}:{self.factor!r}{original}{ramp}"

    @classmethod
    def of(cls, name: str, value: object, error: Refusal) -> RopeScaling:
        """Return the scaling of a text or a mapping. Raise the error that `error` makes for anything else."""
        if isinstance(value, RopeScaling):
            return value
        fields: dict[str, Any] | None = None
        if isinstance(value, str):
            fields = _fields(value)
        elif isinstance(value, Mapping):
            fields = {str(key): entry for key, entry in value.items() if entry is not None}
        if fields is None:
            raise error(name, value, "is no scaling", _FIX)
        kind = fields.pop("rope_type", fields.pop("type", None))
        if kind not in KINDS:
            raise error(name, value, f"has the type {kind!r}, which can't be chosen", _FIX)
        factor, original = fields.pop("factor", None), fields.pop(_ORIGINAL, None)
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 < factor <= MOST_FACTOR:
            raise error(name, value, f"needs a factor above 1, at most {MOST_FACTOR:g}", _FIX)
        if original is not None and (type(original) is not int or not 1 <= original <= MOST_POSITIONS):
            raise error(name, value, f"has no whole number of positions as {_ORIGINAL}", _FIX)
        known = _NUMBERS if kind == "yarn" else {}
        for key, entry in fields.items():
            if key not in known:
                raise error(name, value, f"has {key!r}, which a {kind} scaling does not know", _FIX)
            if isinstance(entry, bool) or not isinstance(entry, int | float) or not 0 < entry < math.inf:
                raise error(name, value, f"has {key}={entry!r}, which is no number above 0", _FIX)
        return cls(kind, float(factor), original, tuple(sorted((key, float(entry)) for key, entry in fields.items())))


def _fields(text: str) -> dict[str, Any] | None:
    """Return the fields of a scaling as text; None for anything else."""
    parts = [_PART.fullmatch(part) for part in text.split(",")] if len(text) <= _LONGEST else []
    marks = [part and part[2] for part in parts]
    if not marks or marks != [":"] + ["="] * (len(marks) - 1):
        return None
    fields: dict[str, Any] = {}
    for part in filter(None, parts):
        whole = part[1] == "original" and part[3].isdecimal()
        key = _ORIGINAL if part[1] == "original" else part[1]
        fields |= {key: int(part[3]) if whole else float(part[3])} if part[2] == "=" else {}
    first = parts[0]
    assert first is not None, "all of them match"
    return {"rope_type": first[1], "factor": float(first[3]), **fields}


def checked_rope_scaling(name: str, value: object, error: Refusal) -> str:
    """Return the text that a config keeps for a scaling. Raise the error that `error` makes."""
    return str(RopeScaling.of(name, value, error))
