"""The cases of Qwen3.5."""

from __future__ import annotations

from typing import Any

from helpers.families import case

STATES = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
}  # fmt: skip
# Whole vectors, which native kernels take.
WHOLE_VECTORS = STATES | {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "hidden_size": 64}
CASES: dict[str, dict[str, Any]] = {
    "qwen3.5": case("qwen3_5_text", "Qwen3_5ForCausalLM", num_hidden_layers=4, **WHOLE_VECTORS),
    "qwen3.5-tied-biases": case(
        "qwen3_5_text", "Qwen3_5ForCausalLM", layer_types=["full_attention", "linear_attention"],
        attention_bias=True, tie_word_embeddings=True, **STATES,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = dict.fromkeys(CASES, "does not write states")
