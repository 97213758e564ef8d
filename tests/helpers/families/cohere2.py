"""The cases of Cohere2."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "cohere2": case(
        "cohere2", "Cohere2ForCausalLM", num_hidden_layers=4, sliding_window=8, logit_scale=0.3,
        tie_word_embeddings=True,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"cohere2": {}}
REFUSED: dict[str, str] = {}
IMPLIED = {"head_dim", "num_key_value_heads"}
