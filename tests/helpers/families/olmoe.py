"""The cases of OLMoE."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "olmoe": case("olmoe", "OlmoeForCausalLM", num_experts=6, num_experts_per_tok=2),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = {"olmoe": "another sum"}
IMPLIED = {"head_dim", "num_key_value_heads"}
