"""Positions beyond a model's own context: the config of a checkpoint with another scaling of its ropes."""

from __future__ import annotations

from typing import Any

from rekindle._src.core.rope_scaling import MOST_POSITIONS, RopeScaling
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.stored import StoredCheckpoint
from rekindle.errors import ConfigError

_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")  # no matter of the scaling
_REPLACED = ("default", "linear", "yarn")  # other scalings hold numbers of each frequency, or are of another kind
_ORIGINAL = "original_max_position_embeddings"
_LEAVE = "Leave it out"


def with_scaling(stored: StoredCheckpoint, text: str | None) -> StoredCheckpoint:
    """Return a checkpoint with the option `rope_scaling` in its config and its fingerprint. Raise ConfigError."""
    if text is None:
        return stored
    scaling, raw = RopeScaling.of("rope_scaling", text, ConfigError), dict(stored.raw)
    old: Any = raw.get("rope_scaling") or {}
    flat: Any = raw.get("rope_parameters") or {}
    per_layer = any(isinstance(entry, dict) for entry in flat.values())
    options: dict[str, Any] = {**({} if per_layer else flat), **old}
    kind = options.get("rope_type", options.get("type", "default"))
    if kind not in _REPLACED:
        problem = f"can't take the place of the checkpoint's own scaling, which is {kind!r}"
        raise ConfigError("rope_scaling", text, problem, _LEAVE)
    longest = raw.get("max_position_embeddings")
    if type(longest) is not int or longest < 1:
        problem = f"needs a model with rotary positions and a context, which {raw.get('model_type')!r} has not"
        raise ConfigError("rope_scaling", text, problem, _LEAVE)
    original = scaling.original or options.get(_ORIGINAL) or raw.get(_ORIGINAL)
    if type(original) is not int or original < 1:
        original = longest if kind == "default" else max(1, int(longest / float(options.get("factor", 1.0))))
    fields = {"rope_type": scaling.kind, "factor": scaling.factor, **dict(scaling.ramp)}
    if scaling.kind == "yarn":
        fields[_ORIGINAL] = original
    raw["rope_scaling"] = {name: options[name] for name in _KEPT if name in options} | fields
    if _ORIGINAL in raw:
        raw[_ORIGINAL] = original
    raw["max_position_embeddings"] = min(MOST_POSITIONS, int(original * scaling.factor))
    return stored._replace(raw=raw, fingerprint=f"{stored.fingerprint}-{scaling}")


def check_scaling(model: ModelConfig, text: str | None) -> None:
    """Raise ConfigError if a model has no rope with the scaling of the option: its family reads another key."""
    if text is None:
        return
    scaling = RopeScaling.of("rope_scaling", text, ConfigError)
    if not any((rope.kind, rope.factor) == (scaling.kind, scaling.factor) for rope in model.ropes):
        raise ConfigError("rope_scaling", text, f"changes nothing in this {model.model_type} model", _LEAVE)
