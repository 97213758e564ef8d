"""The cases of Granite 3 with experts and an MLP beside them."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "granite-moe-shared": case(
        "granitemoeshared", "GraniteMoeSharedForCausalLM", attention_multiplier=0.4, embedding_multiplier=3.0,
        residual_multiplier=0.3, logits_scaling=4.0, num_local_experts=6, num_experts_per_tok=2,
        shared_intermediate_size=56,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = {"granite-moe-shared": "no GGUF files"}
IMPLIED = {"head_dim", "num_key_value_heads"}
