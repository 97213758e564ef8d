"""The cases of Gemma 4."""

from __future__ import annotations

from typing import Any

from helpers.families import case

GEMMA4 = {
    "num_hidden_layers": 3, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 160, "final_logit_softcapping": 30.0,
}  # fmt: skip
SHARED = {
    "num_hidden_layers": 6, "num_kv_shared_layers": 3, "num_key_value_heads": 1, "use_double_wide_mlp": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 1
    + ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "gemma4-shared-pages-and-embeddings-of-layers": case(
        "gemma4_text", "Gemma4ForCausalLM", **{**GEMMA4, **SHARED, "hidden_size_per_layer_input": 16}
    ),
    "gemma4-values-of-keys": case(
        "gemma4_text", "Gemma4ForCausalLM", attention_k_eq_v=True, num_global_key_value_heads=1, **GEMMA4
    ),
    "gemma4-moe": case(
        "gemma4_text", "Gemma4ForCausalLM", enable_moe_block=True, num_experts=6, top_k_experts=2,
        moe_intermediate_size=40, **GEMMA4,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = dict.fromkeys(CASES, "layers of different sizes")
