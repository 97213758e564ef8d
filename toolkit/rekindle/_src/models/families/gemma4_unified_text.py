"""Gemma 4 12B (text), whose model of images has no tower: Gemma 4 without embeddings of layers or experts."""

from __future__ import annotations

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families import gemma4_text
from rekindle._src.models.families.gemma4_text import manifest, module
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import Keys

ABSENT = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}


def config(keys: Keys) -> ModelConfig:
    return gemma4_text.config(Keys({"sliding_window": 1024, **keys.raw, **ABSENT}))


NESTED = {**gemma4_text.NESTED, "max_position_embeddings": 262_144}
FAMILY = Family("Gemma4UnifiedForCausalLM", config, module, manifest, nested=NESTED)
