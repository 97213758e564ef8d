"""The way from a text's hidden states to its embedding: pooling, linear layers, the norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.records import Pooling, Vector

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "Identity": lambda x: x,
    "ReLU": lambda x: np.maximum(x, 0.0),
    "Tanh": np.tanh,
}


def pool(states: NDArray[Any], pooling: Pooling) -> Vector:
    """Return one vector of a text's hidden states [tokens, hidden]."""
    if pooling == "mean":
        return states.mean(axis=0, dtype=np.float32)
    return states[0 if pooling == "cls" else -1].astype(np.float32)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A linear layer after the pooling, computed in float32 on the host."""

    weight: NDArray[np.float32]  # [out, in]
    bias: NDArray[np.float32] | None = None  # [out]
    activation: str = "Identity"  # one of ACTIVATIONS

    def __call__(self, vector: Vector) -> Vector:
        product = self.weight @ vector
        result: Vector = ACTIVATIONS[self.activation](product if self.bias is None else product + self.bias)
        return result


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Embedder:
    """A model's way from hidden states to an embedding."""

    hidden_size: int = 0
    pooling: Pooling = "mean"
    projections: tuple[Projection, ...] = ()
    normalize: bool = True
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # texts in front of a text, by name
    default_prompt: str | None = None  # the name of one of them
    alone: bool = False  # the model embeds, and does nothing else
    trained: bool = False  # the checkpoint says how it embeds

    @property
    def size(self) -> int:
        """The number of components of an embedding."""
        return self.projections[-1].weight.shape[0] if self.projections else self.hidden_size

    def finish(self, pooled: Vector, dimensions: int | None, *, normalize: bool) -> Vector:
        """Return the embedding of pooled states: their projection, its first `dimensions`, at length 1 if asked."""
        for projection in self.projections:
            pooled = projection(pooled)
        vector = pooled[:dimensions]
        length = float(np.linalg.norm(vector.astype(np.float64)))
        return (vector / length).astype(np.float32) if normalize and length > 0.0 else vector
