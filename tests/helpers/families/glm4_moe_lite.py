"""The cases of GLM-4.7-Flash."""

from __future__ import annotations

from typing import Any

from helpers.families import case
from helpers.families.deepseek_v2 import EXPERTS, LATENT

CASES: dict[str, dict[str, Any]] = {
    "glm4-moe-lite": case(
        "glm4_moe_lite", "Glm4MoeLiteForCausalLM", n_group=2, topk_group=1,
        **{**LATENT, "q_lora_rank": 20}, **EXPERTS,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = {"glm4-moe-lite": "latent pages"}
IMPLIED = {"num_key_value_heads"}
