"""The cases of Llama, and SmolLM2, which is one."""

from __future__ import annotations

from typing import Any

from helpers.families import case


def _llama(**options: Any) -> dict[str, Any]:
    return case("llama", "LlamaForCausalLM", **options)


def _scaled(kind: str, **options: Any) -> dict[str, Any]:
    return _llama(rope_theta=10000.0, rope_scaling={"rope_type": kind, "factor": 4.0, **options})


CASES: dict[str, dict[str, Any]] = {
    "llama": _llama(),
    "llama-mha-tied": _llama(num_key_value_heads=6, tie_word_embeddings=True),
    "llama-mqa-five-heads": _llama(hidden_size=60, num_attention_heads=5, num_key_value_heads=1),
    "llama-wide-heads": _llama(head_dim=20),
    "llama-biases": _llama(attention_bias=True, mlp_bias=True),
    "llama-linear-rope": _scaled("linear"),
    "llama-dynamic-rope-past-length": _scaled("dynamic") | {"max_position_embeddings": 16},
    "llama-dynamic-rope-crossing": _scaled("dynamic") | {"max_position_embeddings": 48},
    "llama3-rope": _scaled("llama3", original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0),
    "llama-yarn": _scaled("yarn", original_max_position_embeddings=16),
    "llama-yarn-mscale": _scaled(
        "yarn", original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.3, truncate=False, beta_fast=4.0
    ),
    "smollm2": _llama(hidden_size=54, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {
    "llama": {}, "llama-mha-tied": {}, "llama-mqa-five-heads": {}, "llama-wide-heads": {}, "llama-biases": {},
    "llama-linear-rope": {}, "llama3-rope": {}, "llama-yarn": {}, "smollm2": {},
}  # fmt: skip
REFUSED = {"llama-dynamic-rope-crossing": "dynamic", "llama-yarn-mscale": "truncate"}
IMPLIED = {"head_dim", "num_key_value_heads"}
