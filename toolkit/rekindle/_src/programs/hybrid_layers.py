"""Layers that do not keep all their pages: recurrent ones, which have states, and those that give pages back.

The states of a sequence lie in slots, which a step's rows name; transfers have them as flat arrays. Layers with a
window have a page table of their own, with the pages that each row still has. A row sends their places. On the device
they are spread over a table of all places, so that kernels read both tables alike. At places that the window has passed
the table names the scratch page, which no kernel reads there.

Axes: n slots, B numbers of a sequence's states over all layers; N rows, V pages that a row may have, W places of a page
table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.records import IntArray, Row
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.models.config import ModelConfig
from rekindle._src.programs.feature import Columns, Feature
from rekindle._src.programs.kv_layout import KV, Layer

LEAST = 8  # slots of the tree


def tree_slots(max_requests: int) -> int:
    """Return how many slots the prefix tree has besides those of running requests: a prompt's and a text's for each."""
    return max(LEAST, 2 * max_requests)


def state_slots(model: ModelConfig, max_requests: int, *, shared: bool) -> int:
    """Return all slots of states but the scratch one; those of the tree if prompts are `shared`."""
    if not model.is_recurrent:
        return 0
    return max_requests + (tree_slots(max_requests) if shared else 0)


def state_numbers(kv: KV) -> int:
    """Return how many numbers the states of a sequence are."""
    return sum(math.prod(array.shape[1:]) for array in _arrays(kv))


def gather_states(kv: KV, ids: Array) -> Array:
    """Return the states in the slots `ids` as float32 [n, B]."""
    return jnp.concatenate([array[ids].reshape(ids.shape[0], -1) for array in _arrays(kv)], axis=1)


def scatter_states(kv: KV, ids: Array, states: Array) -> KV:
    """Write what `gather_states` returned to the slots `ids`."""
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


STEPS = 4  # of tokens that are not committed: in flight and planned, and pages of as many that wait to be released


def span(model: ModelConfig, page_size: int) -> int:
    """Return how many pages before a page's end a sequence needs that continues there."""
    return pages_for(model.window, page_size)


def least_pages(model: ModelConfig, config: EngineConfig) -> int:
    """Return with how many pages no step ever lacks one, however its requests lie; the scratch page is one of them."""
    assert config.page_size is not None, "resolved"
    steps = pages_for(STEPS * config.max_tokens_per_step, config.page_size)
    return 1 + config.max_requests * (span(model, config.page_size) + 2) + steps


def tail_pages(model: ModelConfig, config: EngineConfig, pages: int, *, apart: bool) -> int:
    """Return how many pages layers with a window have besides the `pages` of all others; 0: they use those, too.

    They get what as many sequences of half of `max_model_len` need, so that ends of turns stay there too. They never
    need more than the others have, since a sequence has a page here only where it has one there.
    """
    assert config.page_size is not None, "resolved"
    assert config.max_model_len is not None, "resolved"
    if not apart or not model.window:
        return 0
    half = max(1, pages_for(config.max_model_len, 2 * config.page_size))
    share = -(-pages * (span(model, config.page_size) + 2) // half)
    return min(pages, max(least_pages(model, config), share))


class RowPages(NamedTuple):
    """The pages of each row, and the place of the first."""

    first: Array  # [N]
    pages: Array  # [N, V]

    def spread(self, width: int) -> Array:
        """Return the pages at their places [N, width], the scratch page elsewhere."""
        most = self.pages.shape[1]
        places = lax.iota(jnp.int32, width)[None] - self.first[:, None]
        taken = jnp.take_along_axis(self.pages, jnp.clip(places, 0, most - 1), axis=1)
        return jnp.where((places >= 0) & (places < most), taken, 0)


class TailTables(Feature):
    """The places of each row."""

    def __init__(self, most: int) -> None:
        self.row_ints = 1 + most

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig) -> TailTables:
        """Return the feature for rows of up to a step's tokens."""
        assert config.page_size is not None, "resolved"
        assert config.max_model_len is not None, "resolved"
        size = config.page_size
        most = span(model, size) + pages_for(config.max_tokens_per_step, size) + 2
        return cls(min(most, pages_for(config.max_model_len, size)))

    def write_row(self, row: Row, out: IntArray) -> None:
        assert row.tails is not None, "the row has no pages of layers that give some back"
        out[0] = row.first
        out[1 : 1 + len(row.tails)] = row.tails

    def unpack(self, columns: Columns) -> RowPages:
        return RowPages(columns.row_ints[:, 0], columns.row_ints[:, 1:])
