"""The cases of ERNIE 4.5 with experts."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "ernie4.5-moe": case(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", head_dim=12, moe_num_experts=6, moe_k=2, moe_intermediate_size=40,
        moe_num_shared_experts=2, num_hidden_layers=3, tie_word_embeddings=True,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = {"ernie4.5-moe": "shared experts"}
