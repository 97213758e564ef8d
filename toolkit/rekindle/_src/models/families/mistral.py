"""Mistral: Llama with a sliding window in every layer."""

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import Llama, manifest
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import Keys, decoder


def config(keys: Keys) -> ModelConfig:
    return decoder(keys, window=keys.window(4096))


class Mistral(Llama):
    pass


FAMILY = Family("MistralForCausalLM", config, Mistral, manifest)
