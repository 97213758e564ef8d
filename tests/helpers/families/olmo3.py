"""The cases of OLMo 3."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "olmo3": case("olmo3", "Olmo3ForCausalLM", num_hidden_layers=4, sliding_window=8),
    "olmo3-scaled-global-rope": case(
        "olmo3", "Olmo3ForCausalLM", layer_types=["sliding_attention", "full_attention"], sliding_window=8,
        rope_theta=500000.0,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"olmo3": {}, "olmo3-scaled-global-rope": {}}
REFUSED: dict[str, str] = {}
IMPLIED = {"head_dim", "num_key_value_heads"}
