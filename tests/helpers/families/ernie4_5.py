"""The cases of ERNIE 4.5."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "ernie4.5": case("ernie4_5", "Ernie4_5ForCausalLM", head_dim=12, tie_word_embeddings=True),
    "ernie4.5-biases": case("ernie4_5", "Ernie4_5ForCausalLM", head_dim=12, use_bias=True),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"ernie4.5": {}, "ernie4.5-biases": {}}
REFUSED: dict[str, str] = {}
