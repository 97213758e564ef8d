"""The cases of GPT-2."""

from __future__ import annotations

from typing import Any


def _gpt2(**options: Any) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 160, "n_embd": 48, "n_layer": 2,
        "n_head": 4, "n_positions": 128, "bos_token_id": 1, "eos_token_id": 2, **options,
    }  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(),
    "gpt2-odd-options": _gpt2(
        n_inner=72, scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False, activation_function="gelu"
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"gpt2": {}}
REFUSED = {"gpt2-odd-options": "multiplies its scores"}
IMPLIED = {"n_inner"}
