"""The cases of gpt-oss."""

from __future__ import annotations

from typing import Any

from helpers.families import case

YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 12}
CASES: dict[str, dict[str, Any]] = {
    "gpt-oss": case(
        "gpt_oss", "GptOssForCausalLM", sliding_window=8, num_hidden_layers=3, rope_parameters=YARN, **EXPERTS
    ),
    "gpt-oss-no-window-no-biases": case(
        "gpt_oss", "GptOssForCausalLM", layer_types=["full_attention"] * 2, attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **EXPERTS,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = dict.fromkeys(CASES, "rounds the ramp of YaRN")
