"""The cases of Qwen2."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "qwen2": case("qwen2", "Qwen2ForCausalLM", tie_word_embeddings=True),
    "qwen2-window": case(
        "qwen2", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"qwen2": {}}
REFUSED = {"qwen2-window": "sliding window"}
IMPLIED = {"head_dim"}
