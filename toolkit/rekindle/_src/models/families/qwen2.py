"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; the upper layers can have sliding windows."""

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import manifest, module
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder


def sliding(keys: Keys) -> tuple[int | None, tuple[bool, ...]]:
    """Return the sliding window, and which layers use it, from the keys of Qwen2's and Qwen3's configs."""
    window = keys.window(4096) if keys.get("use_sliding_window", False) else None
    first = keys.get("max_window_layers", 28)
    default = [window is not None and layer >= first for layer in range(keys.size("num_hidden_layers"))]
    return window, keys.layer_types(default)


def config(keys: Keys) -> ModelConfig:
    keys.only("use_mrope", False)
    window, slides = sliding(keys)
    return decoder(keys, window=window, slides=slides.__getitem__, qkv_bias=True)


GGUF = GgufForm(architecture="qwen2")
FAMILY = Family("Qwen2ForCausalLM", config, module, manifest, gguf=GGUF)
