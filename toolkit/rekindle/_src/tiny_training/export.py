"""Export of the trained weights as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from rekindle._src.models.base import Graph
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.registry import config_from_hf, manifest
from rekindle._src.tiny_training import tokenizer
from rekindle._src.tiny_training.corpus import END, TURN_END
from rekindle._src.tiny_training.recipe import CONTEXT, Recipe


def tensors(config: ModelConfig, graph: Graph, leaves: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """Return the checkpoint's tensors in bfloat16, by name: the inverse of the manifest's rules for loading."""
    sources = manifest(config).sources
    arrays: dict[str, NDArray[Any]] = {}
    for path, leaf in zip(graph.paths, leaves, strict=True):
        array = np.asarray(leaf)
        for part in sources[path].parts(array.shape):
            arrays[part.name] = np.ascontiguousarray(array[part.place].astype(ml_dtypes.bfloat16))
    return arrays


def write(recipe: Recipe, words: Tokenizer, graph: Graph, leaves: Sequence[Any], folder: Path) -> None:
    """Write weights, configs and tokenizer; `card.write` writes the card."""
    folder.mkdir(parents=True, exist_ok=True)
    end, turn_end = tokenizer.token_id(words, END), tokenizer.token_id(words, TURN_END)
    config = recipe.config([turn_end, end], end)
    weights = folder / "model.safetensors"
    save_file(tensors(config_from_hf(config), graph, leaves), weights, {"format": "pt"})
    weights.chmod(0o644)  # save_file leaves it readable by its owner only
    generation = {"eos_token_id": [turn_end, end], "pad_token_id": end, "do_sample": False}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.write(words, folder, context=CONTEXT)
