"""The cases of EXAONE 4."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "exaone4": case("exaone4", "Exaone4ForCausalLM", num_hidden_layers=4, sliding_window=8, head_dim=12),
    "exaone4-no-window": case(
        "exaone4", "Exaone4ForCausalLM", sliding_window=None, head_dim=12,
        layer_types=["full_attention"] * 2,
    ),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = {"exaone4": "write its windows", "exaone4-no-window": "write its windows"}
IMPLIED = {"head_dim"}
