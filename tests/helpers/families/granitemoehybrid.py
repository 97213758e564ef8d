"""The cases of Granite 4."""

from __future__ import annotations

from typing import Any

from helpers.families import case

FACTORS = {
    "attention_multiplier": 0.4, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 4.0,
    "shared_intermediate_size": 56,
}  # fmt: skip
STATES = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_expand": 2, "mamba_d_conv": 4}
CASES: dict[str, dict[str, Any]] = {
    "granite4": case(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", num_hidden_layers=3, num_local_experts=0,
        layer_types=["mamba", "attention", "mamba"], mamba_n_groups=2, position_embedding_type="nope",
        tie_word_embeddings=True, **FACTORS, **STATES,
    ),
    "granite4-experts": case(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", layer_types=["mamba", "attention"], num_local_experts=6,
        num_experts_per_tok=2, mamba_n_groups=1, **FACTORS, **STATES,
    ),
    "granite4-dense": case(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", layer_types=["attention"] * 2, num_local_experts=0,
        position_embedding_type="rope", **FACTORS, **STATES,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = dict.fromkeys(CASES, "does not write states")
IMPLIED = {"head_dim", "num_key_value_heads", "intermediate_size"}
