"""The cases of ModernBERT."""

from __future__ import annotations

from typing import Any

from helpers.families import case


def _case(**options: Any) -> dict[str, Any]:
    raw = case("modernbert", "ModernBertModel", global_attn_every_n_layers=3, local_attention=12, **options)
    del raw["num_key_value_heads"]
    return {**raw, "num_hidden_layers": 4, "cls_token_id": 1, "sep_token_id": 2}


CASES: dict[str, dict[str, Any]] = {}
EMBEDS = {
    "modernbert": _case(),
    "modernbert-biases": _case(attention_bias=True, mlp_bias=True, global_rope_theta=5000.0, local_rope_theta=700.0),
}
