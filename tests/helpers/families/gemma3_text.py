"""The cases of Gemma 3."""

from __future__ import annotations

from typing import Any

from helpers.families import case
from helpers.families.gemma2 import GEMMA, SCORED

GEMMA3 = {**GEMMA, "num_hidden_layers": 3, "sliding_window": 8, "sliding_window_pattern": 3}
CASES: dict[str, dict[str, Any]] = {
    "gemma3": case("gemma3_text", "Gemma3ForCausalLM", **GEMMA3),
    "gemma3-scaled-global-rope": case(
        "gemma3_text", "Gemma3ForCausalLM", rope_scaling={"rope_type": "linear", "factor": 8.0},
        rope_local_base_freq=5000.0, final_logit_softcapping=0.5, **GEMMA3,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"gemma3": SCORED, "gemma3-scaled-global-rope": SCORED}
REFUSED = {"gemma3": "multiplies its scores"}
