"""What layers do together when a model is divided over devices: sums, lookups and logits over the mesh.

It is part of a graph's precision, static as all of it. Layers of an undivided model have None and do nothing.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

AXES = ("expert", "model")


@dataclasses.dataclass(frozen=True, slots=True)
class Shards:
    """The devices that share a model, seen from a layer."""

    model: int
    expert: int
    vocab_size: int  # of the whole model

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum of what all devices have."""
        return lax.psum(x, AXES)

    def mean(self, x: jax.Array) -> jax.Array:
        """The mean of what all devices have."""
        return lax.pmean(x, AXES)

    def index(self) -> jax.Array:
        """The number of this device among all."""
        return lax.axis_index(AXES)

    def lookup(self, tokens: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
        """The rows of this device's part of a table that tokens have, and whether they are there; 0 if not."""
        own = tokens - self.index() * rows
        here = (own >= 0) & (own < rows)
        return jnp.where(here, own, 0), here

    def whole_vocab(self, logits: jax.Array) -> jax.Array:
        """All logits [N, V] from every device's part; what pads the last part is left out."""
        return lax.all_gather(logits, AXES, axis=logits.ndim - 1, tiled=True)[..., : self.vocab_size]

    def experts_here(self, count: int) -> tuple[jax.Array, int]:
        """The first of `count` experts that this device has, and how many it has."""
        own = count // self.expert
        return lax.axis_index("expert") * own, own
