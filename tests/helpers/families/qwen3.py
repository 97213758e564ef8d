"""The cases of Qwen3."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "qwen3": case("qwen3", "Qwen3ForCausalLM", head_dim=12, tie_word_embeddings=True),
    "qwen3-biases": case("qwen3", "Qwen3ForCausalLM", head_dim=12, attention_bias=True),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"qwen3": {}, "qwen3-biases": {}}
