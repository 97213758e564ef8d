"""The cases of Qwen2-MoE."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "qwen2-moe": case(
        "qwen2_moe", "Qwen2MoeForCausalLM", num_experts=6, moe_intermediate_size=40, num_experts_per_tok=2,
        shared_expert_intermediate_size=56,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = {"qwen2-moe": "shared experts"}
IMPLIED = {"head_dim"}
