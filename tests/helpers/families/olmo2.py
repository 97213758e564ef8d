"""The cases of OLMo 2."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "olmo2": case("olmo2", "Olmo2ForCausalLM"),
    "olmo2-tied-wide-heads": case("olmo2", "Olmo2ForCausalLM", head_dim=12, tie_word_embeddings=True),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"olmo2": {}, "olmo2-tied-wide-heads": {}}
IMPLIED = {"head_dim", "num_key_value_heads"}
