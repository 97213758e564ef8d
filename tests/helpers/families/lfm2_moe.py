"""The cases of LFM2 with experts."""

from __future__ import annotations

from typing import Any

from helpers.families import case

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_dense_layers": 1}
CASES: dict[str, dict[str, Any]] = {
    "lfm2-moe": case(
        "lfm2_moe", "Lfm2MoeForCausalLM", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"],
        tie_word_embeddings=True, **EXPERTS,
    ),
    "lfm2-moe-uncorrected": case(
        "lfm2_moe", "Lfm2MoeForCausalLM", num_hidden_layers=2, layer_types=["full_attention", "conv"],
        use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=2.0, tie_word_embeddings=True, **EXPERTS,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = dict.fromkeys(CASES, "does not write states")
IMPLIED = {"head_dim"}
