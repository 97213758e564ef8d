"""The cases of GLM-4."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "glm": case("glm", "GlmForCausalLM", head_dim=12),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = {"glm": "no GGUF files"}
