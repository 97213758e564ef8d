"""The cases of Starcoder2."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "starcoder2": case("starcoder2", "Starcoder2ForCausalLM", tie_word_embeddings=True),
    "starcoder2-window-no-biases": case("starcoder2", "Starcoder2ForCausalLM", sliding_window=8, use_bias=False),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"starcoder2": {}, "starcoder2-window-no-biases": {"sliding_window": None}}
REFUSED = {"starcoder2-window-no-biases": "no sliding windows"}
IMPLIED = {"head_dim"}
