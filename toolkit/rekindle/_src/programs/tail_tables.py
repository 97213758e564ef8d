"""The page table of layers that give back their pages behind a window: the pages of each row, and where they begin.

Axes: N rows, V pages that a row may have, W places of a page table.

A row sends the places that it has. On the device they are spread over a table of all places, so that kernels read both
tables alike; behind the window the table names the scratch page, which no kernel reads there.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.records import IntArray, Row
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.models.config import ModelConfig
from rekindle._src.programs.feature import Columns, Feature

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
    """Return how many pages layers with a window have beside the `pages` of all others; 0: they have the same.

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


class Spread(NamedTuple):
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

    def unpack(self, columns: Columns) -> Spread:
        return Spread(columns.row_ints[:, 0], columns.row_ints[:, 1:])
