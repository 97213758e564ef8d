"""Mistral: Llama with a sliding window in every layer."""

from rekindle.models.config import Keys, ModelConfig, decoder, reads


@reads("mistral")
def config(keys: Keys) -> ModelConfig:
    keys.layer_types([False] * keys.need("num_hidden_layers"))
    return decoder(keys, kv_heads=8, window=keys.nullable("sliding_window", 4096))
