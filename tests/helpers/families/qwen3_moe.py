"""The cases of Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from helpers.families import MOE, case

SIZES = {"num_experts": 6, "moe_intermediate_size": 40, **MOE}
CASES: dict[str, dict[str, Any]] = {
    "qwen3-moe": case("qwen3_moe", "Qwen3MoeForCausalLM", norm_topk_prob=True, **SIZES),
    "qwen3-moe-dense-layer": case("qwen3_moe", "Qwen3MoeForCausalLM", mlp_only_layers=[0], **SIZES),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"qwen3-moe": {}}
REFUSED = {"qwen3-moe-dense-layer": "layers without experts"}
IMPLIED = {"head_dim"}
