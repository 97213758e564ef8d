"""The cases of LFM3."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "lfm3": case(
        "lfm3", "Lfm3ForCausalLM", num_hidden_layers=4, head_dim=12, sliding_window=8, tie_word_embeddings=True,
        layer_types=["conv", "sliding_attention", "conv", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5,
            },
        },
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = dict.fromkeys(CASES, "no GGUF files")
