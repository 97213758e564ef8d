"""The cases of Mixtral."""

from __future__ import annotations

from typing import Any

from helpers.families import MOE, case

CASES: dict[str, dict[str, Any]] = {
    "mixtral": case("mixtral", "MixtralForCausalLM", num_local_experts=4, **MOE),
    "mixtral-window": case("mixtral", "MixtralForCausalLM", num_local_experts=3, sliding_window=8, **MOE),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"mixtral": {}, "mixtral-window": {}}
IMPLIED = {"head_dim"}
