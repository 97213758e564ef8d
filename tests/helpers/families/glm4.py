"""The cases of GLM-4-0414."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "glm4": case("glm4", "Glm4ForCausalLM", head_dim=16, partial_rotary_factor=0.5),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"glm4": {}}
REFUSED: dict[str, str] = {}
