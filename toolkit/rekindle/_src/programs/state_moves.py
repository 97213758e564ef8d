"""States of sequences on the device: the slots that a step's rows name, and transfers as flat arrays.

Axes: n slots, B numbers of a sequence's states over all layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

from rekindle._src.core.records import IntArray, Row
from rekindle._src.models.config import ModelConfig
from rekindle._src.programs.feature import Columns, Feature
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


class StateSlots(Feature):
    """The slots of states that a step reads and writes, two integers in each row, of models whose layers have states.

    A row may read its sequence's state from one slot and write it to another. So a state that the prefix tree keeps is
    used without copying it, and left for the tree without copying it. Slot 0 is scratch: empty rows use it.
    """

    row_ints = 2

    def write_row(self, row: Row, out: IntArray) -> None:
        out[:] = row.reads, row.writes

    def unpack(self, columns: Columns) -> tuple[Array, Array]:
        return columns.row_ints[:, 0], columns.row_ints[:, 1]
