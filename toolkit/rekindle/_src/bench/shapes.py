"""Model shapes: speed depends on them and not on the weights, so that nothing has to be downloaded.

A shape is a model in memory, or a checkpoint folder on disk, so that other engines can open the same weights. Names of
shapes are checked before JAX is imported, so functions import what they need.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


def hf_config(shape: str) -> dict[str, object]:
    if shape not in SHAPES:
        raise ConfigError("shape", shape, "is not known", f"Use one of {', '.join(SHAPES)}")
    return {"torch_dtype": "bfloat16", "hidden_act": "silu", **SHAPES[shape]}


def is_shape(model: str) -> bool:
    """True if `model` names a shape and not a folder."""
    return model.lower() in SHAPES and not Path(model).exists()


def random_shape(shape: str, *, dtype: str = "bfloat16", quantize: str | None = None) -> LoadedModel:
    """Return a model of that shape with random weights, built in memory."""
    from rekindle._src.models.placement import random_model
    from rekindle._src.models.registry import config_from_hf

    config = config_from_hf(hf_config(shape))
    return random_model(config, seed=0, dtype=dtype, quantize=quantize)


SPECIAL = ("<unk>", "<s>", "</s>")  # ids 0, 1 and 2
DONE = "generation_config.json"  # written last: a folder with it is complete


def write_checkpoint(shape: str, folder: Path) -> Path:
    """Write random bfloat16 weights of a shape and a tokenizer; a complete folder stays unchanged."""
    from safetensors.numpy import save_file

    if (folder / DONE).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    raw: dict[str, Any] = hf_config(shape)
    save_file(_tensors(raw), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(raw["vocab_size"])))
    special = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "unk_token": SPECIAL[0]}
    limits = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": raw["max_position_embeddings"]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, **limits}, indent=1))
    (folder / DONE).write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "do_sample": False}))
    return folder


def _tensors(raw: dict[str, Any]) -> dict[str, NDArray[Any]]:
    import ml_dtypes
    import numpy as np

    from rekindle._src.models.base import abstract_model
    from rekindle._src.models.registry import config_from_hf, manifest

    config = config_from_hf(raw)
    graph, leaves = abstract_model(config)
    sources = manifest(config).sources
    rng = np.random.default_rng(0)
    state: dict[str, NDArray[Any]] = {}
    for path, leaf in zip(graph.paths, leaves, strict=True):
        for part in sources[path].parts(leaf.shape):
            if "norm" in path:
                values = np.ones(part.shape, np.float32)
            else:
                # This width makes greedy decoding vary without repeating its input.
                values = rng.standard_normal(part.shape, np.float32) * np.float32(1.6 * config.hidden_size**-0.5)
            state[part.name] = values.astype(ml_dtypes.bfloat16)
    return state


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return the tokenizer.json of one token per byte; the other tokens can be generated but not encoded."""
    from tokenizers import AddedToken

    from rekindle._src.text.backends import added_section
    from rekindle._src.text.tokenizer_limits import byte_of_character

    names = [*SPECIAL, *sorted(byte_of_character())]
    names += [f"Ġw{number}" for number in range(len(names), vocab_size)]
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [added_section(index, AddedToken(name, special=True)) for index, name in enumerate(SPECIAL)]
    model = {"type": "BPE", "vocab": {name: index for index, name in enumerate(names)}, "merges": []}
    return {"version": "1.0", "added_tokens": added, "pre_tokenizer": step, "decoder": step, "model": model}
