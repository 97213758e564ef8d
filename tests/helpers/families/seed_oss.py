"""The cases of Seed-OSS."""

from __future__ import annotations

from typing import Any

from helpers.families import case

CASES: dict[str, dict[str, Any]] = {
    "seed-oss": case("seed_oss", "SeedOssForCausalLM", head_dim=12),
}  # fmt: skip
HELD: dict[str, dict[str, Any]] = {"seed-oss": {}}
REFUSED: dict[str, str] = {}
IMPLIED = {"num_key_value_heads"}
