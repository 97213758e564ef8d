"""The cases of Gemma 2."""

from __future__ import annotations

from typing import Any

from helpers.families import case

GEMMA = {
    "head_dim": 16, "query_pre_attn_scalar": 2, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
SCORED = {"query_pre_attn_scalar": 16}  # llama.cpp scales Gemma's scores by the head's size
CASES: dict[str, dict[str, Any]] = {
    "gemma2": case(
        "gemma2", "Gemma2ForCausalLM", sliding_window=8, attn_logit_softcapping=6.0, final_logit_softcapping=0.5,
        **GEMMA,
    ),
    "gemma2-no-caps": case(
        "gemma2", "Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None, **GEMMA
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"gemma2": SCORED}
REFUSED = {"gemma2": "multiplies its scores"}
