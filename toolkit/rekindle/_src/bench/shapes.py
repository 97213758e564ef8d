"""Model shapes: speed depends on them and not on the weights, so that nothing has to be downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle._src.models.base import LoadedModel

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 1e5}
_IDS = {"bos_token_id": 1, "eos_token_id": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "micro": {  # so small that all costs outside the model show
        **_LLAMA, **_IDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True,
        "max_position_embeddings": 16384,
    },
    "135m": {  # SmolLM2-135M
        **_LLAMA, **_IDS, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "360m": {  # SmolLM2-360M
        **_LLAMA, **_IDS, "hidden_size": 960, "num_hidden_layers": 32, "num_attention_heads": 15,
        "num_key_value_heads": 5, "intermediate_size": 2560, "vocab_size": 49152, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "0.6b": {  # Qwen3-0.6B
        **_IDS, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 40960,
    },
    "8b": {  # Llama-3-8B
        **_LLAMA, **_IDS, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
    },
}  # fmt: skip


def hf_config(shape: str) -> dict[str, Any]:
    """Return the config.json of a shape."""
    if shape not in SHAPES:
        raise ConfigError("shape", shape, "is not known", f"Use one of {', '.join(SHAPES)}")
    return {"torch_dtype": "bfloat16", "hidden_act": "silu", **SHAPES[shape]}


def is_shape(model: str) -> bool:
    """True if `model` names a shape and not a folder."""
    return model.lower() in SHAPES and not Path(model).exists()


def random_shape(shape: str, *, dtype: str = "bfloat16", quantize: str | None = None, seed: int = 0) -> LoadedModel:
    """Return a model of that shape with random weights, built in memory."""
    from rekindle._src.models.base import random_model  # names of shapes are checked before JAX is imported
    from rekindle._src.models.registry import config_from_hf

    config = config_from_hf(hf_config(shape))
    return random_model(config, seed=seed, dtype=dtype, quantize=quantize)
