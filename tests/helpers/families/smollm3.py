"""The cases of SmolLM3."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "smollm3": case("smollm3", "SmolLM3ForCausalLM", num_hidden_layers=4, tie_word_embeddings=True),
    "smollm3-window": case(
        "smollm3", "SmolLM3ForCausalLM", no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=8
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"smollm3": {}}
REFUSED = {"smollm3-window": "sliding window"}
IMPLIED = {"head_dim"}
