"""The cases of Mistral."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "mistral-window": case("mistral", "MistralForCausalLM", sliding_window=8, head_dim=12),
    "mistral-no-window": case("mistral", "MistralForCausalLM", sliding_window=None),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"mistral-window": {}, "mistral-no-window": {}}
IMPLIED = {"head_dim"}
