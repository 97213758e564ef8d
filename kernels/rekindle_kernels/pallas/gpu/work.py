"""The work table of decode: the keys and the row of each program, built on the device for every step.

Axes: R decode rows, I items of work. Rows differ in length: with a fixed number of programs for each of them, one row
of 32,768 keys among 63 short ones would run on a few multiprocessors while the others are idle. So every row has one
item, and the `extra` ones go to the rows with the most keys: all items have about as much work, at most.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rekindle_kernels.tuning import GpuDecode

# Rows of `Work.items`.
ROW = 0
BEGIN = 1  # first block of keys
END = 2  # block after the last one
LEADS = 3  # 1 for the row's first item


class Work(NamedTuple):
    """The items of all rows, row after row."""

    items: jax.Array  # int32 [4, I]; unused items have no keys
    starts: jax.Array  # int32 [R + 1]: items starts[r] to starts[r + 1] are those of row r


def work_table(
    lengths: jax.Array,  # int32 [R]
    *,
    sliding_window: int | None,
    config: GpuDecode,
    extra: int,
) -> Work:
    """Divide the blocks of keys of all rows among R + extra items."""
    rows, size = lengths.shape[0], config.block_k
    first = jnp.zeros_like(lengths)
    if sliding_window is not None:
        first = jnp.maximum(lengths - sliding_window, 0) // size
    end = (lengths + size - 1) // size
    blocks = end - first
    counts = jnp.ones_like(lengths)
    if extra:
        # Rounding up gives each row less than one item more than its part of `extra`, so there are always enough.
        most = jnp.maximum((jnp.sum(blocks) + extra - 1) // extra, config.least_blocks)
        counts = jnp.maximum((blocks + most - 1) // most, 1)
    share = (blocks + counts - 1) // counts
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    item = jnp.arange(rows + extra, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(item[:, None] >= starts[None, 1:], axis=1), rows - 1)
    part = item - starts[row]
    begin = first[row] + part * share[row]
    items = [row, begin, jnp.minimum(end[row], begin + share[row]), part == 0]
    return Work(jnp.stack([column.astype(jnp.int32) for column in items]), starts)
