"""The cases of Gemma 4 12B, whose model of images has no tower."""

from __future__ import annotations

from typing import Any

from helpers.families import case
from helpers.families.gemma4_text import GEMMA4

OWN = {name: value for name, value in GEMMA4.items() if "per_layer_input" not in name}
CASES: dict[str, dict[str, Any]] = {
    "gemma4-unified": case(
        "gemma4_unified_text", "Gemma4UnifiedForCausalLM", attention_k_eq_v=True, num_global_key_value_heads=1,
        use_bidirectional_attention="vision", **OWN,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = dict.fromkeys(CASES, "no GGUF files")
