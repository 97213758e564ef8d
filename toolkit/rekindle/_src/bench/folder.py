"""A shape as a checkpoint folder on disk, so that other engines can open the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from rekindle._src.bench.shapes import hf_config
from rekindle._src.models.base import abstract_model
from rekindle._src.models.registry import config_from_hf, manifest

SPECIAL = ("<unk>", "<s>", "</s>")  # ids 0, 1 and 2
DONE = "generation_config.json"  # written last: a folder with it is complete


def write_checkpoint(shape: str, folder: Path, *, seed: int = 0) -> Path:
    """Write random bfloat16 weights of a shape and a tokenizer; a complete folder stays unchanged."""
    if (folder / DONE).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    raw = hf_config(shape)
    save_file(_tensors(raw, seed), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    _tokenizer(raw["vocab_size"]).save(str(folder / "tokenizer.json"))
    special = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "unk_token": SPECIAL[0]}
    limits = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": raw["max_position_embeddings"]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, **limits}, indent=1))
    (folder / DONE).write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "do_sample": False}))
    return folder


def _tensors(raw: dict[str, Any], seed: int) -> dict[str, NDArray[Any]]:
    config = config_from_hf(raw)
    graph, leaves = abstract_model(config)
    sources = manifest(config).sources
    rng = np.random.default_rng(seed)
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


def _tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Return a tokenizer with one token per byte; the other tokens can be generated but not encoded."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"Ġw{number}" for number in range(len(names), vocab_size)]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer
