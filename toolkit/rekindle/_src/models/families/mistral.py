"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import manifest, module
from rekindle._src.models.family import Family, GgufForm, windows_in_all_layers
from rekindle._src.models.hf_config import Keys, decoder

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    return decoder(keys, window=keys.window(4096))


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | {"sliding_window": model.integer("attention.sliding_window", 0) or None} | model.rope()


GGUF = GgufForm(architecture="llama", read=read_gguf, paired=True, windows=windows_in_all_layers)
# Those of Mistral Small 3.
NESTED = {
    "vocab_size": 131_072, "hidden_size": 5120, "intermediate_size": 32_768, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "rope_theta": 1_000_000_000.0, "sliding_window": None,
}  # fmt: skip
FAMILY = Family("MistralForCausalLM", config, module, manifest, gguf=GGUF, nested=NESTED)
