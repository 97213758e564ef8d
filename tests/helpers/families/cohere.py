"""The cases of Cohere."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "cohere": case("cohere", "CohereForCausalLM", logit_scale=0.3, tie_word_embeddings=True),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"cohere": {}}
REFUSED: dict[str, str] = {}
IMPLIED = {"head_dim", "num_key_value_heads"}
