"""The collectives of layers when a model is divided over devices: sums, lookups and logits over the mesh.

`Shards` is part of a graph's precision, and static. Layers of an undivided model have None and do nothing.
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
        """Return the sum over all devices."""
        return lax.psum(x, AXES)

    def mean(self, x: jax.Array) -> jax.Array:
        """Return the mean over all devices."""
        return lax.pmean(x, AXES)

    def index(self) -> jax.Array:
        """Return the number of this device among all."""
        return lax.axis_index(AXES)

    def lookup(self, tokens: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
        """Return the tokens' row indices in this device's part of a table, 0 if absent, and True where present."""
        local = tokens - self.index() * rows
        present = (local >= 0) & (local < rows)
        return jnp.where(present, local, 0), present

    def whole_vocab(self, logits: jax.Array) -> jax.Array:
        """Return all logits [N, V] from every device's part, without the padding of the last part."""
        return lax.all_gather(logits, AXES, axis=logits.ndim - 1, tiled=True)[..., : self.vocab_size]

    def experts_here(self, count: int) -> tuple[jax.Array, int]:
        """Return the first of `count` experts on this device, and how many it has."""
        share = count // self.expert
        return lax.axis_index("expert") * share, share
