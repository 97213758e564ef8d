"""Growth: initial weights of a larger model that gives a smaller one's answers.

From random weights a model of 30 million parameters takes a day of two cores: 10,600 steps of 8 to 11 s. Grown from the
shipped one, it says the same before its first step. Its hidden state is the small one's twice over, or more often: what
reads it sums the copies, and what writes it writes them all. Its other layers, heads and units of an MLP read at random
and write nothing yet. Copies are read with different weights, so that training tells them apart.

E hidden size, H query heads, K kv heads, D head dim; small letters are those of the small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.base import LoadedModel
from rekindle._src.models.config import ModelConfig

Array = NDArray[Any]
WRITERS = "attention.out.weight", "mlp.down.weight"


def check(old: ModelConfig, new: ModelConfig) -> None:
    """Raise ValueError where a model can't grow into another."""
    same = (old.vocab_size, old.head_dim) == (new.vocab_size, new.head_dim)
    groups = new.num_heads * old.num_kv_heads == old.num_heads * new.num_kv_heads
    counts = ((model.num_layers, model.num_heads, model.intermediate_size) for model in (new, old))
    grows = all(more >= fewer for more, fewer in zip(*counts, strict=True))
    if not (same and groups and grows) or new.hidden_size % old.hidden_size:
        sizes = f"a hidden size of {old.hidden_size} can't grow into one of {new.hidden_size}"
        fix = "with no fewer layers, heads or units, and as many query heads for a kv head"
        raise ValueError(f"{sizes}: it must be a multiple, {fix}")


def reading(weight: Array, copies: int, rng: np.random.Generator) -> Array:
    """Return a matrix [out, E] that makes of equal copies of a state what `weight` [out, e] makes of the state."""
    parts = rng.standard_normal((copies, *weight.shape)) * weight.std()
    return np.concatenate(list(weight / copies + parts - parts.mean(axis=0)), axis=1)


def put(weight: Array, sections: Sequence[int], small: Array, ends: Sequence[int]) -> None:
    """Write sections of a small matrix's rows to the beginnings of a large one's sections."""
    for large, part in zip(np.split(weight, sections), np.split(small, ends), strict=True):
        large[: len(part)] = part


def grow(weights: dict[str, Array], new: ModelConfig, model: LoadedModel, seed: int) -> None:
    """Write a small model into the weights of a large one, in place, so that it computes the same function."""
    old, rng = model.config, np.random.default_rng(seed)
    check(old, new)
    small = {path: np.asarray(leaf) for path, leaf in zip(model.graph.paths, model.leaves, strict=True)}
    copies, D = new.hidden_size // old.hidden_size, old.head_dim
    places = {layer: layer * new.num_layers // old.num_layers for layer in range(old.num_layers)}
    for path, weight in weights.items():
        if path.endswith(WRITERS):
            weight[:] = 0.0
    for path, own in small.items():
        _, number, name = path.split(".", 2) if path.startswith("layers.") else ("", "", path)
        weight = weights[f"layers.{places[int(number)]}.{name}" if number else path]
        if own.ndim == 1:
            weight[:] = np.tile(own, copies)
        elif name == "embed.weight":
            weight[:] = np.tile(own, (1, copies))
        elif name in WRITERS:
            weight[:, : own.shape[1]] = np.tile(own, (copies, 1))
        else:
            read = reading(own, copies, rng)
            if name == "attention.qkv.weight":
                large, ends = ((H * D, (H + K) * D) for H, K in ((c.num_heads, c.num_kv_heads) for c in (new, old)))
                put(weight, large, read, ends)
            elif name == "mlp.gate_up.weight":
                put(weight, [new.intermediate_size], read, [old.intermediate_size])
            else:
                weight[:] = read
