"""The cases of Falcon-H1."""

from __future__ import annotations

from typing import Any

from helpers.families import case

FACTORS = {
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.7, "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.5], "mlp_multipliers": [0.8, 0.7],
}  # fmt: skip
STATES = {
    "mamba_d_ssm": 72, "mamba_n_heads": 6, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 10,
    "mamba_d_conv": 4, "head_dim": 12,
}  # fmt: skip
WHOLE_VECTORS = STATES | {"mamba_d_ssm": 192, "mamba_d_head": 32, "mamba_d_state": 16}  # which native kernels take
CASES: dict[str, dict[str, Any]] = {
    "falcon-h1": case(
        "falcon_h1", "FalconH1ForCausalLM", rope_theta=1e11, mamba_rms_norm=False, **FACTORS, **WHOLE_VECTORS
    ),
    "falcon-h1-norm-behind-gate": case(
        "falcon_h1", "FalconH1ForCausalLM", tie_word_embeddings=True, mamba_rms_norm=True,
        mamba_norm_before_gate=False, **FACTORS, **STATES,
    ),
    "falcon-h1-norm-before-gate": case(
        "falcon_h1", "FalconH1ForCausalLM", mamba_rms_norm=True, mamba_norm_before_gate=True, **STATES
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = dict.fromkeys(CASES, "does not write states")
IMPLIED = {"head_dim", "num_key_value_heads"}
