"""Mistral: Llama with a sliding window in every layer."""

from rekindle._src.models.config import Keys, ModelConfig, decoder, reads
from rekindle._src.models.families.llama import Llama, manifest

__all__ = ["Mistral", "config", "manifest"]


@reads("mistral")
def config(keys: Keys) -> ModelConfig:
    return decoder(keys, kv_heads=8, window=keys.nullable("sliding_window", 4096))


class Mistral(Llama):
    pass
