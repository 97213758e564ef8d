"""The cases of Phi-3."""

from __future__ import annotations

from typing import Any

from helpers.families import case


def _phi3(**options: Any) -> dict[str, Any]:
    return case("phi3", "Phi3ForCausalLM", **options)


def _longrope(frequencies: int, original: int, **options: Any) -> dict[str, Any]:
    short = [1.0 + 0.1 * i for i in range(frequencies)]
    long = [2.0 + 1.5 * i for i in range(frequencies)]
    scaling = {"type": "longrope", "short_factor": short, "long_factor": long}
    return _phi3(rope_scaling=scaling, original_max_position_embeddings=original, **options)


CASES: dict[str, dict[str, Any]] = {
    "phi3": _phi3(sliding_window=8),
    "phi3-partial-rope": _phi3(partial_rotary_factor=0.5),
    "phi3-longrope-short": _longrope(4, 128),
    "phi3-longrope-past-length": _longrope(4, 16),
    "phi3-longrope-crossing": _longrope(4, 48),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"phi3": {}, "phi3-partial-rope": {}, "phi3-longrope-crossing": {}}
IMPLIED = {"head_dim", "num_key_value_heads"}
