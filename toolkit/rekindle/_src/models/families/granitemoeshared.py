"""Granite 3 with experts and an MLP beside them."""

from __future__ import annotations

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.granitemoe import granite_moe_fields, manifest, module
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import Keys, decoder


def config(keys: Keys) -> ModelConfig:
    shared = keys.get("shared_intermediate_size", 1024)
    return decoder(keys, kv_heads_implied=True, **granite_moe_fields(keys, shared))


FAMILY = Family("GraniteMoeSharedForCausalLM", config, module, manifest)
