"""The cases of Granite 3."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "granite": case(
        "granite", "GraniteForCausalLM", attention_multiplier=0.4, embedding_multiplier=3.0, residual_multiplier=0.3,
        logits_scaling=4.0, tie_word_embeddings=True,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"granite": {}}
REFUSED: dict[str, str] = {}
IMPLIED = {"head_dim", "num_key_value_heads"}
