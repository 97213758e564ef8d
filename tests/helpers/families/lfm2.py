"""The cases of LFM2."""

from __future__ import annotations

from typing import Any

from helpers.families import case

TYPES = ["conv", "full_attention", "conv"]
CASES: dict[str, dict[str, Any]] = {
    "lfm2": case(
        "lfm2", "Lfm2ForCausalLM", num_hidden_layers=3, layer_types=TYPES, block_auto_adjust_ff_dim=False,
        tie_word_embeddings=True,
    ),
    "lfm2-adjusted": case(
        "lfm2", "Lfm2ForCausalLM", num_hidden_layers=3, layer_types=TYPES, block_multiple_of=16, conv_L_cache=7,
        tie_word_embeddings=True,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = dict.fromkeys(CASES, "does not write states")
IMPLIED = {"head_dim"}
