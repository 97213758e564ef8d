"""The cases of Nemotron-H."""

from __future__ import annotations

from typing import Any

from helpers.families import case

STATES = {
    "mamba_num_heads": 6, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 10, "conv_kernel": 4, "head_dim": 12,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "routed_scaling_factor": 1.7,
    "moe_shared_expert_intermediate_size": 56,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "nemotron-h": case(
        "nemotron_h", "NemotronHForCausalLM", hybrid_override_pattern="M-*-M", num_hidden_layers=5, **STATES
    ),
    "nemotron-h-experts-in-groups": case(
        "nemotron_h", "NemotronHForCausalLM", n_group=3, topk_group=2, num_hidden_layers=4,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"], **STATES, **EXPERTS,
    ),
    "nemotron-h-experts-of-latent-vectors": case(
        "nemotron_h", "NemotronHForCausalLM", moe_latent_size=32, num_hidden_layers=4,
        layers_block_type=["linear_attention", "mlp", "full_attention", "moe"], **STATES, **EXPERTS,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = dict.fromkeys(CASES, "does not write states")
IMPLIED = {"head_dim", "num_key_value_heads", "num_hidden_layers", "intermediate_size"}
