"""The cases of DeepSeek-V2."""

from __future__ import annotations

from typing import Any

from helpers.families import case

LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 6,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
    "mscale": 0.707, "mscale_all_dim": 0.707, "rope_theta": 10_000.0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "deepseek-v2": case("deepseek_v2", "DeepseekV2ForCausalLM", rope_parameters=YARN, **LATENT, **EXPERTS),
    "deepseek-v2-queries-of-a-vector": case(
        "deepseek_v2", "DeepseekV2ForCausalLM", routed_scaling_factor=1.5, **{**LATENT, "q_lora_rank": 20}, **EXPERTS
    ),
    "deepseek-v2-groups": case(
        "deepseek_v2", "DeepseekV2ForCausalLM", topk_method="group_limited_greedy", n_group=3, topk_group=2,
        **LATENT, **EXPERTS,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = dict.fromkeys(CASES, "latent pages")
IMPLIED = {"num_key_value_heads", "head_dim"}
