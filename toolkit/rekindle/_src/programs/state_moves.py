"""States of single sequences as flat arrays, and back: for transfers between the device and the tiers below it.

Axes: n slots, B numbers of a sequence's states over all layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

from rekindle._src.models.config import ModelConfig
from rekindle._src.programs.kv_layout import KV, Layer

LEAST = 8  # slots of the tree


def tree_slots(max_requests: int) -> int:
    """Return how many slots the prefix tree has beside those of running requests: a prompt's and a text's for each."""
    return max(LEAST, 2 * max_requests)


def slots(model: ModelConfig, max_requests: int, *, shared: bool) -> int:
    """Return all slots of states but the scratch one; those of the tree if prompts are `shared`."""
    if not model.is_recurrent:
        return 0
    return max_requests + (tree_slots(max_requests) if shared else 0)


def numbers(kv: KV) -> int:
    """Return how many numbers the states of a sequence are."""
    return sum(math.prod(array.shape[1:]) for array in _arrays(kv))


def gather(kv: KV, ids: Array) -> Array:
    """Return the states in the slots `ids` as float32 [n, B]."""
    return jnp.concatenate([array[ids].reshape(ids.shape[0], -1) for array in _arrays(kv)], axis=1)


def scatter(kv: KV, ids: Array, states: Array) -> KV:
    """Write what `gather` returned to the slots `ids`."""
    first = 0
    layers: list[Layer] = []
    for layer in kv:
        arrays = []
        for array in layer.states:
            size = math.prod(array.shape[1:])
            part = states[:, first : first + size].reshape(-1, *array.shape[1:])
            arrays.append(array.at[ids].set(part))
            first += size
        layers.append(layer._replace(states=tuple(arrays)))
    return tuple(layers)


def _arrays(kv: KV) -> Iterator[jax.Array]:
    for layer in kv:
        yield from layer.states
