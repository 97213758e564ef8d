"""The cases of Qwen3.5 with experts."""

from __future__ import annotations

from typing import Any

from helpers.families import case
from helpers.families.qwen3_5_text import STATES

CASES: dict[str, dict[str, Any]] = {
    "qwen3.5-moe": case(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", num_hidden_layers=4, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=40, shared_expert_intermediate_size=56, **STATES,
    ),
}  # fmt: skip
del CASES["qwen3.5-moe"]["intermediate_size"]
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = dict.fromkeys(CASES, "does not write states")
