"""The cases of HunYuan."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "hunyuan": case(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", head_dim=12,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, rope_theta=10000.0,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"hunyuan": {}}
REFUSED: dict[str, str] = {}
IMPLIED = {"head_dim", "num_key_value_heads"}
