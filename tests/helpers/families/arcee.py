"""The cases of Arcee."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "arcee": case("arcee", "ArceeForCausalLM"),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"arcee": {}}
REFUSED: dict[str, str] = {}
IMPLIED = {"head_dim", "num_key_value_heads"}
